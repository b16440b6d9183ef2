#pragma once

#include <vector>

#include <annulus/ring/sharded_attention.hpp>

namespace annulus::ring {

/// The arguments of a ShardedAttention to tune. `options` hold no choice of the chain. All
/// references must outlive it.
struct TunedCall {
  const AttentionProblem& problem;
  const ShardedOperands& operands;
  Mesh& mesh;
  const Registry& registry;
  Device& device;
  const ShardedAttentionOptions& options;
};

/// Times the candidates that have no reason to be passed over, in their order, on tensors of its
/// own. Sets their seconds: the median time of a call on the slowest rank, including the host's
/// wait for the device. Sets the reason of candidates that cannot be prepared, that fail in the
/// rehearsal, or that are not begun within `options.tuning.seconds`. Collective over the mesh, with
/// the same candidates and the same outcome on all ranks.
///
/// Throws AgreedFailure on all ranks if one lacks memory for the tensors, and whatever a call
/// throws, after which the job can only be aborted.
void time_candidates(const TunedCall& call, std::vector<TunedCandidate>& candidates);

/// The first of the timed candidates that takes at most 2 % longer than the fastest;
/// null if none was timed.
[[nodiscard]] const TunedCandidate* fastest(const std::vector<TunedCandidate>& candidates);

}  // namespace annulus::ring
