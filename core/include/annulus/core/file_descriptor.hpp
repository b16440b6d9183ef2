#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <annulus/core/handle.hpp>

namespace annulus::files {

struct FileDescriptorTraits {
  using Raw = int;
  static Raw null() noexcept { return -1; }
  static void release(Raw raw) noexcept;
};
/// Owning POSIX file descriptor.
using FileDescriptor = Handle<FileDescriptorTraits>;

/// Opens a regular file for reading. Throws FileError when it is missing, unreadable or not a
/// regular file (a directory, a pipe).
[[nodiscard]] FileDescriptor open_for_reading(const std::string& path);
/// Size in bytes. Throws SystemError.
[[nodiscard]] std::int64_t file_size(const FileDescriptor& file, const std::string& path);

/// Fills `bytes` from `offset` on. Throws FileError if the file is too short, SystemError if the
/// system refuses. `path` is only for the message.
void read_at(const FileDescriptor& file, const std::string& path, std::int64_t offset,
             std::span<std::byte> bytes);
/// Writes all of `bytes` from `offset` on. Throws SystemError.
void write_at(const FileDescriptor& file, const std::string& path, std::int64_t offset,
              std::span<const std::byte> bytes);

/// Makes an empty file `bytes` long and allocates the space. If the file system cannot allocate
/// (NFS 3), only compares with the free space. Throws SystemError saying how much is needed.
void reserve(const FileDescriptor& file, std::int64_t bytes);

/// Brings a file or a directory to disk. Throws SystemError.
void sync(const FileDescriptor& file, const std::string& path);
/// Brings the file to disk and closes it. Throws SystemError.
void sync_and_close(FileDescriptor file, const std::string& path);

}  // namespace annulus::files
