#pragma once

#include <cstdint>
#include <string>

#include <annulus/files/file_descriptor.hpp>

namespace annulus::files {

/// A file that takes its target's name when it is complete, and is gone if it never is. Not
/// collective: one rank has it.
///
/// Where the file system can (O_TMPFILE), it has no name until then, so that nothing is left
/// however the process ends. Elsewhere it is TARGET.PID-N.tmp beside the target. A process that is
/// killed cannot remove that, but the next TemporaryFile of the same target does: a lock (flock)
/// tells whether the writer still lives.
class TemporaryFile {
 public:
  enum class Naming : std::uint8_t { when_complete, at_once };

  /// Creates the file; if the target is a symbolic link, what it points to is meant. Throws
  /// FileError for a target that cannot be written (a missing directory, a device), SystemError
  /// when the system fails.
  explicit TemporaryFile(std::string target, Naming naming = Naming::when_complete);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();

  /// The file as created, open for writing.
  [[nodiscard]] const FileDescriptor& descriptor() const noexcept { return file_; }
  /// Its temporary name; empty while it has none.
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Gives it a temporary name unless it has one, for processes that cannot reach it otherwise.
  /// Throws SystemError.
  void give_name();
  /// Brings the complete file to disk under a temporary name, so that little can fail in commit().
  /// Once. Throws SystemError.
  void complete();
  /// Gives the file the target's name; calls complete() before if nobody has. Once. Throws
  /// SystemError.
  void commit();
  /// The same where nothing has the target's name yet; else returns false, and what has it stays.
  [[nodiscard]] bool commit_if_new();

 private:
  [[nodiscard]] bool rename_if_new() const;
  void create_named();

  std::string target_;  // links resolved
  std::string path_;
  FileDescriptor directory_;  // empty where it may be written to but not read
  FileDescriptor file_;       // until it is complete
  FileDescriptor lock_;       // from then on
  int slot_ = -1;             // in the table of files that signals remove
};

/// Where writing to `path` ends up: follows symbolic links, even to what does not exist yet. Throws
/// FileError for circular links.
[[nodiscard]] std::string link_target(const std::string& path);

/// Removes the named temporary files of this process. For signal handlers.
void remove_temporary_files() noexcept;

}  // namespace annulus::files
