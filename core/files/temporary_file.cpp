#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/temporary_file.hpp>

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

// The slot taken; −1 if none is free, so that a signal leaves the file behind.
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

// True for the user's errors: a directory or a name that cannot be written to.
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

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent;
}

// The directory of a target, opened early: once the file has its name, nothing may fail for lack of
// a descriptor. A writable directory may be unreadable.
FileDescriptor open_directory_of(const std::string& path) {
  FileDescriptor file(::open(directory_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file && errno != EACCES) throw_cannot_create(path, errno);
  return file;
}

// Some file systems cannot sync directories but keep names safe anyway.
void sync_directory(const FileDescriptor& directory, const std::string& path) {
  if (!directory || ::fsync(directory.get()) == 0) return;
  if (errno != EINVAL && errno != ENOTSUP) throw SystemError("fsync " + directory_of(path), errno);
}

// Linux's path for an open file without a name.
std::string magic_link(const FileDescriptor& file) {
  return fmt::format("/proc/self/fd/{}", file.get());
}

// Takes the lock that tells others that the writer is alive; false if they hold it or have removed
// the file. If the file system has no locks, no process removes anything.
bool lock(const FileDescriptor& file) {
  struct stat status {};
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  return ::fstat(file.get(), &status) == 0 && status.st_nlink > 0;
}

std::string temporary_name(const std::string& target, int attempt) {
  return fmt::format("{}.{}-{}.tmp", target, ::getpid(), attempt);
}
constexpr int kAttempts = 100;

// True if `name` is temporary_name(target, …) of any process.
bool is_temporary_name(std::string_view name, std::string_view target) {
  constexpr std::string_view kEnd = ".tmp";
  if (!name.starts_with(target) || !name.ends_with(kEnd)) return false;
  name.remove_prefix(target.size());
  if (name.size() <= kEnd.size() || name.front() != '.') return false;
  name = name.substr(1, name.size() - 1 - kEnd.size());
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  const std::size_t dash = name.find('-');
  return dash != std::string_view::npos && is_number(name.substr(0, dash)) &&
         is_number(name.substr(dash + 1));
}

// Removes temporary files of the target whose writers were killed; failures are ignored.
void remove_stale_files(const std::string& target) {
  const std::string name = std::filesystem::path(target).filename();
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory_of(target), error), end;
       !error && entry != end; entry.increment(error)) {
    if (!is_temporary_name(entry->path().filename().native(), name)) continue;
    const FileDescriptor file(
        ::open(entry->path().c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(entry->path().c_str());
  }
}

}  // namespace

std::string link_target(const std::string& path) {
  constexpr int kMaximumLinks = 40;  // as in Linux
  std::filesystem::path target = path;
  for (int links = 0;; ++links) {
    std::error_code error;
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error) return target;  // no link
    if (links == kMaximumLinks) throw_cannot_create(path, ELOOP);
    target = target.parent_path() / next;  // an absolute `next` stands alone
  }
}

TemporaryFile::TemporaryFile(std::string target, Naming naming)
    : target_(link_target(target)), directory_(open_directory_of(target_)) {
  // Renaming would even replace a device.
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw FileError(target, "cannot be written: exists and is not a regular file");
  }
  // A name that is too long would otherwise fail only after the work.
  if (::lstat(temporary_name(target_, kAttempts).c_str(), &status) != 0 && errno != ENOENT) {
    throw_cannot_create(target_, errno);
  }
  remove_stale_files(target_);
  if (naming == Naming::when_complete) {
    file_.reset(::open(directory_of(target_).c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666));
    // Without /proc the file could never get a name.
    if (file_ && ::access(magic_link(file_).c_str(), F_OK) == 0) {
      ::flock(file_.get(), LOCK_EX | LOCK_NB);
      return;
    }
  }
  create_named();
}

void TemporaryFile::create_named() {
  file_.reset();
  // O_EXCL keeps two jobs that write the same path apart.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    path_ = temporary_name(target_, attempt);
    file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file_ && errno != EEXIST) break;
    if (file_ && lock(file_)) {
      slot_ = remember(path_);
      return;
    }
  }
  const int error_number = file_ ? EAGAIN : errno;
  path_.clear();
  throw_cannot_create(target_, error_number);
}

TemporaryFile::~TemporaryFile() {
  if (!path_.empty()) ::unlink(path_.c_str());
  forget(slot_);
}

void TemporaryFile::give_name() {
  if (!path_.empty()) return;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string name = temporary_name(target_, attempt);
    if (::linkat(AT_FDCWD, magic_link(file_).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) ==
        0) {
      path_ = name;
      slot_ = remember(path_);
      return;
    }
    if (errno != EEXIST) break;
  }
  throw SystemError("link " + target_, errno);
}

void TemporaryFile::complete() {
  // The lock tells other jobs that the temporary name is in use, so it must last until the file has
  // its final name. Without a free descriptor it does not.
  lock_.reset(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0));
  sync(file_, target_);
  give_name();  // link() cannot replace an older file; rename() can
  sync_and_close(std::move(file_), target_);
}

void TemporaryFile::commit() {
  if (file_) complete();
  if (std::rename(path_.c_str(), target_.c_str()) != 0) {
    throw SystemError("rename " + path_ + " to " + target_, errno);
  }
  path_.clear();
  sync_directory(directory_, target_);
}

bool TemporaryFile::commit_if_new() {
  complete();
  if (!rename_if_new()) return false;
  path_.clear();
  sync_directory(directory_, target_);
  return true;
}

// Checks for a file and gives the name in one step, if the file system can, so that one of two jobs
// is first.
bool TemporaryFile::rename_if_new() const {
  if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) == 0) {
    return true;
  }
  if (errno == EEXIST) return false;
  if (::link(path_.c_str(), target_.c_str()) == 0) {
    ::unlink(path_.c_str());
    return true;
  }
  if (errno == EEXIST || ::access(target_.c_str(), F_OK) == 0) return false;
  if (std::rename(path_.c_str(), target_.c_str()) == 0) return true;
  throw SystemError("rename " + path_ + " to " + target_, errno);
}

void remove_temporary_files() noexcept {
  for (const Slot& slot : slots) {
    if (slot.state == Slot::removable) ::unlink(slot.path.data());
  }
}

}  // namespace annulus::files
