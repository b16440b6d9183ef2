#pragma once

#include <optional>
#include <string>

#include <annulus/ring/sharded_attention.hpp>
#include <annulus/ring/tuning_cache.hpp>

#include "tuning/autotune.hpp"
#include "tuning/choice.hpp"
#include "tuning/file.hpp"

namespace annulus::ring {

/// Decides what a call leaves open. The links, in order: the caller, an overlay, the cache in
/// memory, the cache in a file, a measurement, heuristics. Rank 0 reads the caches, and all ranks
/// follow.
class TuningChain {
 public:
  /// `call.options` must have their overlay applied. `input` was made from them and must outlive
  /// the chain, as must all that the call refers to. `schedule` is the one that the options resolve
  /// to, or "auto".
  TuningChain(const TunedCall& call, const PlanInput& input, std::string schedule);

  /// The decision of the first link that can decide. Collective over the mesh.
  const Decision& decide();
  /// Reports that a decision failed in planning or preparation, with this message. Returns true if
  /// a later link may decide; decide() then asks the later links.
  bool reject(const std::string& message);
  /// The end of the final error's message: "; before that, …" with all links that were passed over
  /// and why, or "" if no choice of an earlier link failed.
  [[nodiscard]] std::string tried() const;

 private:
  [[nodiscard]] bool asks(DecidedBy link) const { return link >= next_; }
  void pass(DecidedBy link, std::string reason);
  void answer(DecidedBy link, std::string why);
  void share();
  [[nodiscard]] bool look_up();
  [[nodiscard]] bool take(const TuningEntry& entry, DecidedBy link, const std::string& why);
  [[nodiscard]] bool measure();
  [[nodiscard]] std::vector<Transport> possible_transports(std::vector<TunedCandidate>& others);
  void keep(const TuningEntry& entry, std::string& why);

  TunedCall call_;
  const PlanInput& input_;
  std::string schedule_;
  OpenChoices open_;
  CacheFile file_;
  std::optional<TuningKey> key_;
  DecidedBy next_ = DecidedBy::caller;
  bool has_rejected_ = false;
  Decision decision_;
};

/// Throws ArgumentError on all ranks unless all ask for the same policy, limits and overlay, and
/// the limits make sense. Collective.
void check_same_tuning(Control& control, const ShardedAttentionOptions& options);

}  // namespace annulus::ring
