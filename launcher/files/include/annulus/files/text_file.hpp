#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <annulus/core/temporary_file.hpp>

namespace annulus::files {

/// A text file that appears complete under its name or not at all. Not collective: one rank has it.
class TextFile {
 public:
  /// Opens a temporary file beside `path`, so that an impossible name fails before the work. Throws
  /// as TemporaryFile does.
  explicit TextFile(std::string path);
  /// Writes the text and gives the file its name. Throws SystemError.
  void commit(std::string_view text);
  /// The same, unless a file of this name exists by now: see TemporaryFile::commit_if_new().
  [[nodiscard]] bool commit_if_new(std::string_view text);

 private:
  void write(std::string_view text) const;

  std::string path_;
  TemporaryFile temporary_;
};

/// The most bytes that read_text() takes.
inline constexpr std::size_t kMaximumText = std::size_t{4} << 20U;

/// The whole of a small text file or pipe. Throws FileError if it cannot be read or is longer than
/// kMaximumText.
[[nodiscard]] std::string read_text(const std::string& path);

}  // namespace annulus::files
