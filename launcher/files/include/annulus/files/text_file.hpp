#pragma once

#include <string>
#include <string_view>

#include <annulus/files/file_descriptor.hpp>
#include <annulus/files/temporary_file.hpp>

namespace annulus::files {

/// A text file that appears complete under its name or not at all. Not collective: one rank has it.
class TextFile {
 public:
  /// Opens a temporary file beside `path`, so that an impossible name fails before the work. Throws
  /// as TemporaryFile does.
  explicit TextFile(std::string path);
  /// Writes the text and gives the file its name. Throws SystemError.
  void commit(std::string_view text);

 private:
  std::string path_;
  TemporaryFile temporary_;
  FileDescriptor file_;
};

}  // namespace annulus::files
