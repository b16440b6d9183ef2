#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/file_descriptor.hpp>

namespace annulus::files {

void FileDescriptorTraits::release(Raw raw) noexcept {
  ::close(raw);
}

FileDescriptor open_for_reading(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw FileError(path, std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw SystemError("fstat " + path, errno);
  if (!S_ISREG(status.st_mode)) throw FileError(path, "is not a regular file");
  return file;
}

std::int64_t file_size(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw SystemError("fstat " + path, errno);
  return status.st_size;
}

void read_at(const FileDescriptor& file, const std::string& path, std::int64_t offset,
             std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(file.get(), bytes.data(), bytes.size(), offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw SystemError("read " + path, errno);
    }
    if (got == 0) {
      throw FileError(path, "ends at byte " + std::to_string(offset) + ", where " +
                                std::to_string(bytes.size()) + " more bytes are expected");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

void write_at(const FileDescriptor& file, const std::string& path, std::int64_t offset,
              std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::pwrite(file.get(), bytes.data(), bytes.size(), offset);
    if (put < 0) {
      if (errno == EINTR) continue;
      throw SystemError("write " + path, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(put));
    offset += put;
  }
}

void reserve(const FileDescriptor& file, std::int64_t bytes) {
  const auto fail = [&](int error_number) {
    throw SystemError("needs " + human_bytes(static_cast<std::uint64_t>(bytes)), error_number);
  };
  // glibc's posix_fallocate() would write into every block where the file system lacks this.
  while (::fallocate(file.get(), 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) fail(errno);
    if (::ftruncate(file.get(), bytes) != 0) fail(errno);
    struct statvfs status {};
    const bool known = ::fstatvfs(file.get(), &status) == 0 && status.f_blocks > 0;
    if (known && static_cast<std::uint64_t>(bytes) / status.f_frsize >= status.f_bavail) {
      fail(ENOSPC);
    }
    return;
  }
}

void sync(const FileDescriptor& file, const std::string& path) {
  // Some file systems cannot sync a directory and say so.
  if (::fsync(file.get()) != 0 && errno != EINVAL) throw SystemError("fsync " + path, errno);
}

void sync_and_close(FileDescriptor file, const std::string& path) {
  sync(file, path);
  // A network file system may report a failed write only here.
  if (::close(file.release()) != 0) throw SystemError("close " + path, errno);
}

}  // namespace annulus::files
