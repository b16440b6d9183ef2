#include "file_reference.hpp"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::files {
namespace {

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

struct stat status_of(const FileDescriptor& file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw SystemError("fstat", errno);
  return status;
}

}  // namespace

FileReference reference_to(const FileDescriptor& file) {
  const struct stat status = status_of(file);
  return {host_name(), fmt::format("/proc/{}/fd/{}", ::getpid(), file.get()), status.st_dev,
          status.st_ino};
}

std::string to_string(const FileReference& reference) {
  return fmt::format("{} {} {} {}", reference.path, reference.device, reference.inode,
                     reference.host);
}

FileReference parse_reference(const std::string& text) {
  FileReference reference;
  std::istringstream(text) >> reference.path >> reference.device >> reference.inode >>
      reference.host;
  return reference;
}

FileDescriptor open_through_proc(const FileReference& reference) {
  if (reference.host != host_name()) return {};
  FileDescriptor file(::open(reference.path.c_str(), O_WRONLY | O_CLOEXEC));
  if (!file) return {};
  const struct stat status = status_of(file);
  if (status.st_dev != reference.device || status.st_ino != reference.inode) return {};
  return file;
}

FileDescriptor open_by_name(const std::string& name, const FileReference& reference) {
  FileDescriptor file(::open(name.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file) {
    throw SystemError(name + ", created by rank 0, cannot be opened (do all nodes share it?)",
                      errno);
  }
  // Hosts number the devices of a shared file system differently, but agree on its inodes.
  if (status_of(file).st_ino != reference.inode) {
    throw LibraryError(name + ": is not the file that rank 0 created (do all nodes share it?)");
  }
  return file;
}

}  // namespace annulus::files
