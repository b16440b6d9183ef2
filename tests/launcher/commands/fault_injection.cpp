// A library for LD_PRELOAD that makes something go wrong at one step of one rank, for
// cli_fault_test.py. A step is a call of MPI, or of the system about a file, by the main thread;
// step 0 is the start of the process, before main(), and its end is one as well.
//
// FAULT_RANK and FAULT_STEP, a number or a name, say where, and FAULT_KIND says what:
//
//   kill, stop  SIGKILL or SIGSTOP for this process
//   memory      no more address space than there is now, and large requests are refused
//   disk        no space left for files below the working directory
//   pipe        nobody reads standard output any more
//
// The step where it happened goes to the file FAULT_REPORT. With another kind nothing happens, and
// every rank writes the names of its steps to FAULT_REPORT.<rank>, a line each.

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <new>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <mpi.h>

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// The function of this name that this library hides.
template <class Function>
Function* hidden(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

// True if a file lies below the working directory: others are not the program's.
bool is_of_the_job(const std::string& path) {
  std::array<char, PATH_MAX> folder{};
  if (::getcwd(folder.data(), folder.size()) == nullptr) return false;
  return path.empty() || path.front() != '/' || path.starts_with(std::string(folder.data()) + '/');
}

bool is_of_the_job(int descriptor) {
  std::array<char, PATH_MAX> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t size = ::readlink(link.c_str(), path.data(), path.size());
  return size > 0 && is_of_the_job(std::string(path.data(), static_cast<std::size_t>(size)));
}

/// The address space of this process, in bytes.
rlim_t address_space() {
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  return pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
}

// Allocation asks before Fault exists, and while it is made.
std::atomic<bool> memory_is_short = false;

class Fault {
 public:
  Fault()
      : kind_(variable("FAULT_KIND")),
        report_(variable("FAULT_REPORT")),
        rank_(variable("OMPI_COMM_WORLD_RANK")) {
    const bool here = !rank_.empty() && rank_ == variable("FAULT_RANK");
    if (here) step_ = variable("FAULT_STEP");
    reach("start");
  }
  ~Fault() {
    if (happens()) {
      reach("end");
      return;
    }
    std::ofstream file(report_ + "." + rank_);
    for (const char* name : names_) file << name << '\n';
  }
  Fault(const Fault&) = delete;
  Fault& operator=(const Fault&) = delete;

  void reach(const char* name) {
    if (inside_ > 0 || std::this_thread::get_id() != main_thread_) return;
    if (!happens()) names_.push_back(name);
    if (const long number = count_++; step_ == name || step_ == std::to_string(number))
      happen(name);
  }
  [[nodiscard]] bool disk_is_full() const { return disk_is_full_; }

  /// While it lives, calls that a library makes of its own are no steps.
  class Inside {
   public:
    explicit Inside(Fault& fault) : fault_(fault), counts_(is_main(fault)) {
      if (counts_) ++fault_.inside_;
    }
    ~Inside() {
      if (counts_) --fault_.inside_;
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    static bool is_main(const Fault& fault) {
      return std::this_thread::get_id() == fault.main_thread_;
    }
    Fault& fault_;
    bool counts_;
  };

 private:
  [[nodiscard]] bool happens() const { return kind_ != "none"; }

  void happen(const char* name) {
    std::ofstream(report_) << name << '\n';
    if (kind_ == "kill") ::kill(::getpid(), SIGKILL);
    if (kind_ == "stop") ::kill(::getpid(), SIGSTOP);
    if (kind_ == "memory") {
      const rlimit limit{address_space(), RLIM_INFINITY};
      ::setrlimit(RLIMIT_AS, &limit);
      memory_is_short = true;
    }
    if (kind_ == "disk") disk_is_full_ = true;
    if (kind_ == "pipe") {
      std::array<int, 2> ends{};
      if (::pipe(ends.data()) != 0) return;
      ::dup2(ends[1], STDOUT_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
    }
  }

  std::thread::id main_thread_ = std::this_thread::get_id();
  std::string kind_;
  std::string report_;
  std::string rank_;
  std::string step_;
  long count_ = 0;
  int inside_ = 0;
  std::atomic<bool> disk_is_full_ = false;
  std::vector<const char*> names_;
};

Fault& fault() {
  static Fault only;
  return only;
}

[[gnu::constructor]] void begin() {
  static_cast<void>(fault());
}

template <class Function, class... Arguments>
auto call(const char* name, Arguments... arguments) {
  const Fault::Inside inside(fault());
  return hidden<Function>(name)(arguments...);
}

/// One step: the hidden function of this name, called with the arguments.
template <class Function, class... Arguments>
auto step(const char* name, Arguments... arguments) {
  fault().reach(name);
  return call<Function>(name, arguments...);
}

/// The same for what takes space on a disk, which may be full.
template <class Function, class... Arguments>
auto writing_step(const char* name, bool to_the_job, Arguments... arguments)
    -> decltype(hidden<Function>(name)(arguments...)) {
  fault().reach(name);
  if (fault().disk_is_full() && to_the_job) {
    errno = ENOSPC;
    return -1;
  }
  return call<Function>(name, arguments...);
}

// The rest of a heap serves small requests even then, such as an error's text.
bool is_refused(std::size_t bytes) {
  constexpr std::size_t kSmall = 4096;
  return memory_is_short && bytes > kSmall;
}

}  // namespace

void* operator new(std::size_t bytes) {
  if (is_refused(bytes)) throw std::bad_alloc();
  static auto* const function = hidden<void*(std::size_t)>("_Znwm");
  return function(bytes);
}

extern "C" {

void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  static auto* const function = hidden<void*(std::size_t, std::size_t)>("aligned_alloc");
  return is_refused(bytes) ? nullptr : function(alignment, bytes);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const bool makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  const mode_t mode = makes ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  using Open = int(const char*, int, ...);
  if (!makes) return step<Open>("open", path, flags);
  return writing_step<Open>("open", is_of_the_job(path), path, flags, mode);
}
ssize_t pread(int file, void* data, size_t size, off_t offset) {
  return step<decltype(pread)>("pread", file, data, size, offset);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  return writing_step<decltype(pwrite)>("pwrite", is_of_the_job(file), file, data, size, offset);
}
int fallocate(int file, int mode, off_t offset, off_t size) {
  return writing_step<decltype(fallocate)>("fallocate", is_of_the_job(file), file, mode, offset,
                                           size);
}
int fsync(int file) {
  return writing_step<decltype(fsync)>("fsync", is_of_the_job(file), file);
}
int linkat(int from, const char* source, int to, const char* target, int flags) noexcept {
  return writing_step<decltype(linkat)>("linkat", is_of_the_job(target), from, source, to, target,
                                        flags);
}
int rename(const char* source, const char* target) noexcept {
  return step<decltype(rename)>("rename", source, target);
}

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  return step<decltype(MPI_Init_thread)>("MPI_Init_thread", argc, argv, required, provided);
}
int MPI_Comm_idup(MPI_Comm communicator, MPI_Comm* copy, MPI_Request* request) {
  return step<decltype(MPI_Comm_idup)>("MPI_Comm_idup", communicator, copy, request);
}
int MPI_Comm_free(MPI_Comm* communicator) {
  return step<decltype(MPI_Comm_free)>("MPI_Comm_free", communicator);
}
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  constexpr int kHeartbeat = 1;  // sent by the clock, so their number differs from run to run
  if (tag == kHeartbeat) {
    return call<decltype(MPI_Isend)>("MPI_Isend", data, count, type, to, tag, communicator,
                                     request);
  }
  return step<decltype(MPI_Isend)>("MPI_Isend", data, count, type, to, tag, communicator, request);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm communicator,
              MPI_Request* request) {
  return step<decltype(MPI_Irecv)>("MPI_Irecv", data, count, type, from, tag, communicator,
                                   request);
}
int MPI_Finalize() {
  return step<decltype(MPI_Finalize)>("MPI_Finalize");
}

}  // extern "C"
