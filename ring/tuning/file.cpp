#include "tuning/file.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string_view>
#include <sys/file.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/file_descriptor.hpp>
#include <annulus/core/temporary_file.hpp>

#include "tuning/text.hpp"

namespace annulus::ring {
namespace {

namespace fs = std::filesystem;
using files::FileDescriptor;

// Writers hold the lock only while they write a small file, so frequent tries get a turn.
constexpr std::chrono::milliseconds kBetweenTries{1};
// A larger file was not written by this library.
constexpr off_t kMaximumBytes = off_t{64} << 20;

/// The reason for a warning that the cache cannot be used.
class Trouble : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  Trouble(const std::string& operation, int error_number)
      : std::runtime_error(fmt::format("{}: {}", operation, std::strerror(error_number))) {}
};

// The text of the file; nothing if there is no file.
std::optional<std::string> read_text(const std::string& path) {
  // A pipe would block.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    if (errno == ENOENT) return std::nullopt;
    throw Trouble("cannot be read", errno);
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw Trouble("cannot be read", errno);
  if (!S_ISREG(status.st_mode)) throw Trouble("is not a file");
  if (status.st_size > kMaximumBytes) {
    throw Trouble(fmt::format("has {} bytes, more than a tuning cache has", status.st_size));
  }
  std::string text(static_cast<std::size_t>(status.st_size), '\0');
  files::read_at(file, path, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

// An empty file has no entries. Throws FileError.
std::vector<TuningEntry> entries_of(const std::string& text, const std::string& path) {
  return kind_of(text) == CacheText::empty ? std::vector<TuningEntry>{} : parse_tuning(text, path);
}

constexpr const char* kForeign = "holds no tuning cache";

/// A lock that one process holds at a time, across all machines that share the file system.
class Lock {
 public:
  Lock(const std::string& path, std::chrono::milliseconds patience)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (!file_) throw Trouble(path + " cannot be opened", errno);
    const auto begin = std::chrono::steady_clock::now();
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) throw Trouble(path + " cannot be locked", errno);
      if (std::chrono::steady_clock::now() - begin > patience) {
        throw Trouble(fmt::format("{} has been locked by other processes for {:g} s", path,
                                  std::chrono::duration<double>(patience).count()));
      }
      std::this_thread::sleep_for(kBetweenTries);
    }
  }

 private:
  FileDescriptor file_;  // closing it releases the lock
};

// The whole text appears under the name, or nothing changes.
void replace(const std::string& path, std::string_view text) {
  files::TemporaryFile file(path);
  files::write_at(file.descriptor(), path, 0, std::as_bytes(std::span(text)));
  file.commit();
}

// Renames a broken cache and returns the new name. The caller holds the lock.
std::string set_aside(const std::string& path) {
  for (int number = 1;; ++number) {
    const std::string name = fmt::format("{}.broken-{}", path, number);
    // link() fails if the name is taken.
    if (::link(path.c_str(), name.c_str()) == 0) {
      if (::unlink(path.c_str()) != 0) throw Trouble("cannot be renamed", errno);
      return name;
    }
    if (errno != EEXIST) throw Trouble("cannot be renamed to " + name, errno);
  }
}

// The absolute path that a symbolic link leads to, even if there is no file.
std::string real_path(const std::string& path) {
  return fs::absolute(files::link_target(path));
}

template <class Body>
void warn_of_trouble(const CacheFile& file, std::vector<std::string>& warnings, const Body& body) {
  try {
    body();
  } catch (const FileError& error) {  // names the path itself
    warnings.push_back(fmt::format("{} {}", file.shown, error.what()));
  } catch (const std::exception& error) {
    warnings.push_back(fmt::format("{} {}: {}", file.shown, file.path, error.what()));
  }
}

}  // namespace

std::string default_tuning_file() {
  const auto directory = [](const char* name) {
    const char* const value = std::getenv(name);
    // As the XDG specification says, relative paths are ignored.
    return value != nullptr && *value == '/' ? std::string(value) : std::string();
  };
  // The name has the version, so that programs of several versions do not fight over one file.
  const std::string name = fmt::format("/annulus/tuning-v{}.json", kTuningVersion);
  if (const std::string cache = directory("XDG_CACHE_HOME"); !cache.empty()) return cache + name;
  if (const std::string home = directory("HOME"); !home.empty()) return home + "/.cache" + name;
  return {};
}

void check_is_cache(const CacheFile& file, bool will_write) {
  if (!file.named) return;
  const auto fail = [&](const std::string& problem) {
    throw ArgumentError(file.shown, fmt::format("{}, which {}", file.path, problem),
                        "a tuning cache, or the name of a new file");
  };
  std::string trouble;
  try {
    const std::string directory = fs::path(real_path(file.path)).parent_path();
    if (std::error_code error; will_write && !fs::is_directory(directory, error)) {
      trouble = fmt::format("is in {}, not an existing directory", directory);
    } else if (const std::optional<std::string> text = read_text(file.path);
               text && kind_of(*text) == CacheText::foreign) {
      trouble = kForeign;
    }
  } catch (const std::exception& error) {
    std::error_code ignored;
    if (fs::exists(fs::symlink_status(file.path, ignored))) trouble = error.what();
  }
  if (!trouble.empty()) fail(trouble);
}

FileAnswer find_in_file(const CacheFile& file, const TuningKey& key) {
  const std::string& path = file.path;
  FileAnswer answer;
  answer.reason = path + " cannot be used";
  warn_of_trouble(file, answer.warnings, [&] {
    const std::optional<std::string> text = read_text(path);
    if (!text) {
      answer.reason = path + " is not there";
      return;
    }
    const std::vector<TuningEntry> entries = entries_of(*text, path);
    const auto found = std::find_if(entries.begin(), entries.end(),
                                    [&](const TuningEntry& entry) { return entry.key == key; });
    if (found == entries.end()) {
      answer.reason = fmt::format("{} has no entry for this problem", path);
    } else {
      answer.entry = *found;
      answer.reason.clear();
    }
  });
  return answer;
}

std::vector<std::string> keep_in_file(const CacheFile& file, TuningEntry entry,
                                      std::chrono::milliseconds patience) {
  std::vector<std::string> warnings;
  warn_of_trouble(file, warnings, [&] {
    const std::string path = real_path(file.path);
    if (!file.named) fs::create_directories(fs::path(path).parent_path());
    const Lock lock(path + ".lock", patience);
    const std::string text = read_text(path).value_or("");
    const CacheText kind = kind_of(text);
    if (kind == CacheText::other_version) {
      throw Trouble(
          "was written by another version of annulus and stays as it is; nothing was kept");
    }
    if (kind == CacheText::foreign && file.named) {
      throw Trouble(fmt::format("{} and stays as it is; nothing was kept", kForeign));
    }
    std::vector<TuningEntry> entries;
    try {
      entries = entries_of(text, file.path);
    } catch (const FileError& error) {
      warnings.push_back(
          fmt::format("{} {}; it was renamed to {}", file.shown, error.what(), set_aside(path)));
    }
    std::erase_if(entries, [&](const TuningEntry& other) { return other.key == entry.key; });
    entries.push_back(std::move(entry));
    if (entries.size() > kMaximumEntries) {
      entries.erase(entries.begin(), entries.end() - std::ptrdiff_t{kMaximumEntries});
    }
    replace(path, to_json(entries) + "\n");
  });
  return warnings;
}

}  // namespace annulus::ring
