#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <annulus/ring/tuning_cache.hpp>

/// The persistent cache: one JSON file (text.hpp), for all processes of a user. It is replaced as a
/// whole, so a reader always sees one version. Writers take turns by a lock on FILE.lock, which
/// stays. A cache that cannot be used costs only time, so it is a warning; only a file that the
/// caller named by mistake is an error.
namespace annulus::ring {

struct CacheFile {
  std::string path;
  /// True if the caller named the file, which may then be something else. A file under the default
  /// name is always ours.
  bool named = true;
  std::string shown = "tuning cache";  ///< in messages
};

/// Throws ArgumentError if a named file exists and is not a tuning cache, not even a broken one: it
/// must be neither read nor replaced. Also throws if the file will be written and its directory is
/// missing.
void check_is_cache(const CacheFile& file, bool will_write = true);

struct FileAnswer {
  std::optional<TuningEntry> entry;
  std::string reason;                 ///< why there is none
  std::vector<std::string> warnings;  ///< a sentence each
};

/// Reads the file, which need not exist. A file that cannot be understood stays as it is. Does not
/// throw.
[[nodiscard]] FileAnswer find_in_file(const CacheFile& file, const TuningKey& key);

/// The most entries of a file. If there are more, the oldest are dropped.
inline constexpr std::size_t kMaximumEntries = 256;

/// Adds the entry to the file, or replaces the one of the same key. Creates missing directories,
/// unless the file was named. A broken cache is renamed to FILE.broken-1, or the first free number.
/// A cache of another version stays as it is, and so does a named file that is not a cache; nothing
/// is kept then. Waits at most for `patience` while other processes write. Returns warnings; does
/// not throw.
[[nodiscard]] std::vector<std::string> keep_in_file(
    const CacheFile& file, TuningEntry entry,
    std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace annulus::ring
