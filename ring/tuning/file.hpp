#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <annulus/ring/tuning_cache.hpp>

/// The persistent cache: one JSON file (text.hpp), for all processes of a user. It is replaced as a
/// whole, so that a reader sees one version of it. Writers take turns by a lock on FILE.lock, which
/// stays. A cache that cannot be used costs time, not results, and is a warning; only a file that
/// the caller named by mistake is an error.
namespace annulus::ring {

struct CacheFile {
  std::string path;
  /// True if the caller named it. What stands under the default name is ours, whatever it is; a
  /// file that was named may be something else.
  bool named = true;
  std::string shown = "tuning cache";  ///< in messages
};

/// Throws ArgumentError if a file that was named is there and is no tuning cache, not even a broken
/// one: it must neither be read nor be replaced. Likewise if it will be written, and its directory
/// is not there.
void check_is_cache(const CacheFile& file, bool will_write = true);

struct FileAnswer {
  std::optional<TuningEntry> entry;
  std::string reason;                 ///< why there is none
  std::vector<std::string> warnings;  ///< a sentence each
};

/// Reads the file, which need not be there. One that cannot be understood stays where it is. Does
/// not throw.
[[nodiscard]] FileAnswer find_in_file(const CacheFile& file, const TuningKey& key);

/// Entries of a file. The oldest go when there are more.
inline constexpr std::size_t kMaximumEntries = 256;

/// Adds the entry to those of the file, or replaces that of the same key. Makes missing
/// directories, unless the file was named. A broken cache is renamed to FILE.broken-1 or the first
/// number that is free. One of another version stays as it is, and so does a file that was named
/// and is no cache: nothing is kept then. Waits at most for `patience` while other processes write.
/// Returns warnings; does not throw.
[[nodiscard]] std::vector<std::string> keep_in_file(
    const CacheFile& file, TuningEntry entry,
    std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace annulus::ring
