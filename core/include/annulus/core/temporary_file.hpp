#pragma once

#include <cstdint>
#include <string>

#include <annulus/core/file_descriptor.hpp>

namespace annulus::files {

/// A file that takes its target's name when it is complete, and disappears if it never is. Not
/// collective: one rank has it.
///
/// If the file system allows (O_TMPFILE), the file has no name until it is complete, so nothing is
/// left however the process ends. Otherwise its name is TARGET.PID-N.tmp, beside the target. A
/// killed process cannot remove that file, but the next TemporaryFile of the same target does: a
/// lock (flock) tells if the writer is alive.
class TemporaryFile {
 public:
  enum class Naming : std::uint8_t { when_complete, at_once };

  /// Creates the file. If the target is a symbolic link, the file that it points to is the target.
  /// Throws FileError for a target that cannot be written (a missing directory, a device),
  /// SystemError when the system fails.
  explicit TemporaryFile(std::string target, Naming naming = Naming::when_complete);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();

  /// The file as created, open for writing.
  [[nodiscard]] const FileDescriptor& descriptor() const noexcept { return file_; }
  /// Its temporary name; empty while it has none.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Gives the file a temporary name, if it has none, for processes that cannot reach it otherwise.
  /// Throws SystemError.
  void give_name();
  /// Brings the complete file to disk under a temporary name, so that little can fail in commit().
  /// Call it once. Throws SystemError.
  void complete();
  /// Gives the file the target's name. Calls complete() first if nobody has called it. Call it
  /// once. Throws SystemError.
  void commit();
  /// Like commit() if no file has the target's name. Otherwise returns false and leaves that file.
  [[nodiscard]] bool commit_if_new();

 private:
  [[nodiscard]] bool rename_if_new() const;
  void create_named();

  std::string target_;  // links resolved
  std::string path_;
  FileDescriptor directory_;  // empty if it may be written to but not read
  FileDescriptor file_;       // until it is complete
  FileDescriptor lock_;       // from then on
  int slot_ = -1;             // in the table of files that signals remove
};

/// The file that writing to `path` writes: follows symbolic links, even to a missing file. Throws
/// FileError for circular links.
[[nodiscard]] std::string link_target(const std::string& path);

/// Removes the named temporary files of this process. For signal handlers.
void remove_temporary_files() noexcept;

}  // namespace annulus::files
