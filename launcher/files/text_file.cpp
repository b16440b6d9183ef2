#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <span>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>

namespace annulus::files {

TextFile::TextFile(std::string path) : path_(std::move(path)), temporary_(path_) {}

void TextFile::write(std::string_view text) const {
  write_at(temporary_.descriptor(), path_, 0, std::as_bytes(std::span(text)));
}

void TextFile::commit(std::string_view text) {
  write(text);
  temporary_.commit();
}

bool TextFile::commit_if_new(std::string_view text) {
  write(text);
  return temporary_.commit_if_new();
}

std::string read_text(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw FileError(path, fmt::format("cannot be opened: {}", std::strerror(errno)));
  std::string text;
  std::array<char, 1 << 16> piece{};
  for (;;) {
    const ssize_t count = ::read(file.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(path, fmt::format("cannot be read: {}", std::strerror(errno)));
    if (count == 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(count));
    if (text.size() > kMaximumText) {
      throw FileError(path, fmt::format("is longer than {} MiB", kMaximumText >> 20U));
    }
  }
}

}  // namespace annulus::files
