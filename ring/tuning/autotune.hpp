#pragma once

#include <vector>

#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {

/// A call to be made ready: what ShardedAttention is made of. `options` hold no choice of the
/// chain. What the members refer to must outlive it.
struct TunedCall {
  const AttentionProblem& problem;
  const ShardedOperands& operands;
  Mesh& mesh;
  const Registry& registry;
  Device& device;
  const ShardedAttentionOptions& options;
};

/// Times those candidates that have no reason to be passed over, in their order, on tensors of its
/// own, and sets their seconds: the median time of a call of the slowest rank, the host's wait for
/// the device included. Of those that cannot be made ready, of those that fail when they are
/// rehearsed, and of those not begun within `options.tuning.seconds`, it sets the reason.
/// Collective over the mesh, with the same candidates on all ranks; the outcome is the same on all.
///
/// Throws what ranks throw together if they lack memory for the tensors (AgreedFailure); and
/// whatever a call throws, after which the job can only be aborted.
void time_candidates(const TunedCall& call, std::vector<TunedCandidate>& candidates);

/// The first of the timed candidates that takes at most 2 % longer than the fastest;
/// null if none was timed.
[[nodiscard]] const TunedCandidate* fastest(const std::vector<TunedCandidate>& candidates);

}  // namespace annulus::ring
