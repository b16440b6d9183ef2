#pragma once

#include <string>
#include <utility>

#include <annulus/files/file_descriptor.hpp>

namespace annulus::files {

/// A file beside its target that takes the target's name when it is complete, and is removed if it
/// never is. Not collective: one rank has it.
class TemporaryFile {
 public:
  /// Creates the file under a name of its own. Throws FileError for a target that cannot be written
  /// (a missing directory, a device), SystemError when the system fails.
  explicit TemporaryFile(std::string target);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// The file as created, open for writing. Once.
  [[nodiscard]] FileDescriptor take_descriptor() noexcept { return std::move(file_); }
  /// Gives the complete file the target's name. Once. Throws SystemError.
  void commit();

 private:
  std::string target_;
  std::string path_;
  FileDescriptor file_;
  int slot_ = -1;  // in the table of what signals remove
  bool committed_ = false;
};

/// From now on SIGINT, SIGTERM and SIGHUP remove the temporary files of this process before they
/// end it as ever; signals that are ignored or handled already are left alone. mpirun sends the
/// ranks SIGTERM when one of them dies. A process that gets SIGKILL cannot clean up: its files
/// named TARGET.PID-N.tmp remain.
void remove_temporary_files_on_signals();

}  // namespace annulus::files
