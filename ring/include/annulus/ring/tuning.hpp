#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/mesh/transport.hpp>

/// Chooses what the caller leaves open: implementation, transport, schedule, ulysses degree, inner
/// size and head groups. See docs/tuning.md.
namespace annulus::ring {

class TuningCache;

/// The links of the chain that may decide. Results are right under every policy, but only `off`
/// gives the same bits at any time: schedules and kernels round differently.
enum class TuningPolicy : std::uint8_t {
  off,     ///< the cost model
  cached,  ///< earlier measurements, else the cost model; writes no file
  measure  ///< earlier measurements, else a new one, which is kept
};

[[nodiscard]] std::string_view name_of(TuningPolicy policy) noexcept;
/// Throws ArgumentError("tuning", …), listing the names, for any other text.
[[nodiscard]] TuningPolicy parse_tuning_policy(std::string_view name);

/// Everything that can be chosen. Every member may be left open.
struct Choice {
  std::string implementation = {};  ///< of the registry; "" or "auto": open
  std::string schedule = {};        ///< a name of docs/semantics.md §5; "" or "auto": open
  Transport transport = Transport::automatic;
  int ulysses_degree = 0;  ///< these three as in PlanOptions; 0: open
  int inner_size = 0;
  std::int64_t head_group_bytes = 0;

  [[nodiscard]] bool is_open() const { return *this == Choice(); }
  bool operator==(const Choice&) const = default;
};

/// "schedule hybrid, ulysses degree 2, implementation sdpa, transport peer"; "nothing".
[[nodiscard]] std::string choice_text(const Choice& choice);
/// `inner`, with open members filled in from `outer`.
[[nodiscard]] Choice nested(const Choice& outer, const Choice& inner);

struct TuningOptions {
  TuningPolicy policy = TuningPolicy::off;
  /// The persistent cache, which rank 0 reads and writes: an existing cache, or a new name in a
  /// directory that exists. Any other file causes an ArgumentError and stays as it is. "":
  /// default_tuning_file(), whose directories are created.
  std::string file = {};
  std::string shown = "tuning cache";  ///< what messages call it
  /// The cache in memory; null for none. Must outlive the call that it is passed to. Only rank 0's
  /// counts.
  TuningCache* cache = nullptr;
  /// Plans whose predicted time is at most this many times the best are measured …
  double factor = 2;
  int candidates = 8;   ///< … and no more than these
  int runs = 5;         ///< timed calls of each, of which the median counts
  double seconds = 10;  ///< no further candidate is begun after this time
  /// The commit of the caller's program, if known. Measurements of other builds do not count.
  std::string build = {};
};

/// The links of the chain, in order.
enum class DecidedBy : std::uint8_t {
  caller,       ///< left nothing open
  overlay,      ///< left nothing open, together with the caller
  memory,       ///< the cache in memory
  file,         ///< the persistent cache
  measurement,  ///< candidates were timed
  heuristics    ///< the cost model
};

[[nodiscard]] std::string_view name_of(DecidedBy link) noexcept;

/// A plan that was timed or passed over.
struct TunedCandidate {
  Choice choice = {};
  double predicted = 0;     ///< seconds of a call on the slowest rank, by the cost model …
  double seconds = 0;       ///< … and measured, the median; 0 if it was passed over
  std::string reason = {};  ///< why it was passed over; "" if it was timed
  bool operator==(const TunedCandidate&) const = default;
};

/// The deciding link and its choice. The same on every rank, except for `warnings`.
struct Decision {
  struct Passed {
    DecidedBy link;
    std::string reason;
  };
  DecidedBy by = DecidedBy::heuristics;
  /// The choice; empty if the caller or heuristics decide.
  Choice choice;
  std::string why;                         ///< "measured 3 of 5 candidates in 0.21 s, kept in FILE"
  std::vector<Passed> passed;              ///< earlier links, and why they did not decide
  std::vector<TunedCandidate> candidates;  ///< of a measurement, now or then
  std::vector<std::string> warnings;       ///< about the file, a sentence each; on rank 0
};

/// "$XDG_CACHE_HOME/annulus/tuning-v1.json", with the version of its format, else in ~/.cache; ""
/// where the environment names neither directory.
[[nodiscard]] std::string default_tuning_file();

}  // namespace annulus::ring
