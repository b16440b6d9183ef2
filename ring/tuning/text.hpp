#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/ring/tuning_cache.hpp>

namespace annulus::ring {

/// The version of the persistent cache's format.
inline constexpr int kTuningVersion = 1;

/// The state of a file's text, which may have been cut off.
enum class CacheText : std::uint8_t {
  empty,
  cache,          ///< of this version, perhaps broken
  other_version,  ///< of another version of the format
  foreign         ///< something else, without any sign of a tuning cache
};
[[nodiscard]] CacheText kind_of(std::string_view text);

/// JSON of the persistent cache, every number exact:
///
///     {"schema": "annulus.tuning", "version": 1, "entries": [
///       {"key": {"device": "…", "shape": "B=1 T=…", …}, "date": "2026-11-22T12:00:00Z",
///        "choice": {"schedule": "ring", "implementation": "native"},
///        "candidates": [{"choice": {…}, "predicted_seconds": 1e-3, "seconds": 1.2e-3},
///                       {"choice": {…}, "predicted_seconds": 2e-3, "passed_over": "…"}]}]}
///
/// A choice has the members that are not open.
[[nodiscard]] std::string to_json(const std::vector<TuningEntry>& entries);
/// Reads it back. Throws FileError, naming `path` and the key, for another schema or version, a key
/// of an entry that comes twice, and a value that is missing, unknown or of the wrong type. Names
/// of implementations are not checked, since a program may add some.
[[nodiscard]] std::vector<TuningEntry> parse_tuning(std::string_view text, const std::string& path);

/// Candidates, to share them with other ranks, and back. Throws InternalError for any other text.
[[nodiscard]] std::string candidates_json(const std::vector<TunedCandidate>& candidates);
[[nodiscard]] std::vector<TunedCandidate> parse_candidates(std::string_view text);

/// A decision, likewise, without its warnings.
[[nodiscard]] std::string to_json(const Decision& decision);
[[nodiscard]] Decision parse_decision(std::string_view text);

}  // namespace annulus::ring
