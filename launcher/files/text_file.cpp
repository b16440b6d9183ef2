#include <span>
#include <utility>

#include <annulus/files/text_file.hpp>

namespace annulus::files {

TextFile::TextFile(std::string path)
    : path_(std::move(path)), temporary_(path_), file_(temporary_.take_descriptor()) {}

void TextFile::commit(std::string_view text) {
  write_at(file_, path_, 0, std::as_bytes(std::span(text)));
  sync_and_close(std::move(file_), path_);
  temporary_.commit();
}

}  // namespace annulus::files
