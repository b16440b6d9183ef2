#pragma once

#include <cstdint>
#include <string>

#include <annulus/core/file_descriptor.hpp>

namespace annulus::files {

/// Identifies a file that a process has created, for other processes.
struct FileReference {
  std::string host;
  std::string path;  ///< for processes of that host, while the creator has it open
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
};

/// A reference to an open file of this process. Throws SystemError.
[[nodiscard]] FileReference reference_to(const FileDescriptor& file);
[[nodiscard]] std::string to_string(const FileReference& reference);
[[nodiscard]] FileReference parse_reference(const std::string& text);

/// Opens the file for writing without its name. Empty if this process cannot: on another host or in
/// another container.
[[nodiscard]] FileDescriptor open_through_proc(const FileReference& reference);
/// Opens the file for writing by one of its names. Throws SystemError, or LibraryError if the name
/// now means another file.
[[nodiscard]] FileDescriptor open_by_name(const std::string& name, const FileReference& reference);

}  // namespace annulus::files
