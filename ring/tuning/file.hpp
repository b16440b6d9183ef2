#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/ring/tuning_cache.hpp>

/// The persistent cache: one JSON file (text.hpp), for all processes of a user. It is replaced as a
/// whole, so that a reader sees all of one version. Writers take turns by a lock on FILE.lock,
/// which stays. Nothing here throws: a cache that cannot be used costs time, not results.
namespace annulus::ring {

struct FileAnswer {
  std::optional<TuningEntry> entry;
  std::string reason;                 ///< why there is none
  std::vector<std::string> warnings;  ///< a sentence each
};

/// Reads the file, which need not be there. One that cannot be understood stays where it is.
[[nodiscard]] FileAnswer find_in_file(const std::string& path, const TuningKey& key);

/// Adds the entry to those of the file, or replaces that of the same key. Makes missing
/// directories. A file that cannot be understood is renamed to FILE.broken-1 or the first number
/// that is free. Returns warnings.
[[nodiscard]] std::vector<std::string> keep_in_file(const std::string& path, TuningEntry entry);

}  // namespace annulus::ring
