#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/temporary_file.hpp>

namespace annulus::files {
namespace {

/// A path for the signal handler, which must neither allocate nor lock.
struct Slot {
  enum State : int { vacant, changing, removable };
  std::atomic<int> state = vacant;
  std::array<char, PATH_MAX> path{};
};
static_assert(std::atomic<int>::is_always_lock_free);

// The program writes five files at most.
std::array<Slot, 16> slots;

// The slot taken, −1 if there is none: then a signal leaves the file behind.
int remember(const std::string& path) noexcept {
  if (path.size() >= PATH_MAX) return -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    int expected = Slot::vacant;
    if (!slots[i].state.compare_exchange_strong(expected, Slot::changing)) continue;
    std::memcpy(slots[i].path.data(), path.c_str(), path.size() + 1);
    slots[i].state = Slot::removable;
    return static_cast<int>(i);
  }
  return -1;
}

void forget(int slot) noexcept {
  if (slot >= 0) slots[static_cast<std::size_t>(slot)].state = Slot::vacant;
}

extern "C" void remove_and_die(int signal) {
  for (const Slot& slot : slots) {
    if (slot.state == Slot::removable) ::unlink(slot.path.data());
  }
  ::raise(signal);  // SA_RESETHAND has restored the default action
}

// The user's doing: a directory or a name that cannot be written to.
bool is_bad_path(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EACCES:
    case EPERM:
    case EROFS:
    case ENAMETOOLONG:
    case ELOOP:
      return true;
    default:
      return false;
  }
}

[[noreturn]] void throw_cannot_create(const std::string& path, int error_number) {
  if (is_bad_path(error_number)) {
    throw FileError(path, std::string("cannot be written: ") + std::strerror(error_number));
  }
  throw SystemError("create " + path, error_number);
}

void sync_directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent;
  const FileDescriptor file(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file) throw SystemError("open " + directory, errno);
  sync(file, directory);
}

}  // namespace

TemporaryFile::TemporaryFile(std::string target) : target_(std::move(target)) {
  // Renaming would happily replace a device.
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw FileError(target_, "cannot be written: exists and is not a regular file");
  }
  // O_EXCL keeps two jobs that write the same path apart.
  constexpr int kAttempts = 100;
  for (int attempt = 0; !file_ && attempt < kAttempts; ++attempt) {
    path_ = fmt::format("{}.{}-{}.tmp", target_, ::getpid(), attempt);
    file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_ && errno != EEXIST) break;
  }
  if (!file_) throw_cannot_create(target_, errno);
  slot_ = remember(path_);
}

TemporaryFile::~TemporaryFile() {
  if (!committed_) ::unlink(path_.c_str());
  forget(slot_);
}

void TemporaryFile::commit() {
  if (std::rename(path_.c_str(), target_.c_str()) != 0) {
    throw SystemError("rename " + path_ + " to " + target_, errno);
  }
  committed_ = true;
  sync_directory_of(target_);
}

void remove_temporary_files_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction current {};
    if (::sigaction(signal, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) continue;
    struct sigaction action {};
    action.sa_handler = remove_and_die;
    action.sa_flags = SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace annulus::files
