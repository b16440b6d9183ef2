#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <span>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/launcher/text_file.hpp>

namespace annulus::launcher {

TextFile::TextFile(std::string path) : path_(std::move(path)) {
  // Renaming would happily replace a device.
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw FileError(path_, "cannot be written: exists and is not a regular file");
  }
  std::string name = fmt::format("{}.{}.tmp", path_, ::getpid());
  file_.reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file_) throw FileError(path_, fmt::format("cannot be written: {}", std::strerror(errno)));
  temporary_ = TemporaryPath(std::move(name));
}

void TextFile::commit(std::string_view text) {
  write_at(file_, path_, 0, std::as_bytes(std::span(text)));
  if (::fsync(file_.get()) != 0) throw SystemError("fsync " + path_, errno);
  // A network file system may report a failed write only here.
  if (::close(file_.release()) != 0) throw SystemError("close " + path_, errno);
  if (std::rename(temporary_.path().c_str(), path_.c_str()) != 0) {
    throw SystemError("rename " + temporary_.path() + " to " + path_, errno);
  }
  static_cast<void>(temporary_.keep());
}

}  // namespace annulus::launcher
