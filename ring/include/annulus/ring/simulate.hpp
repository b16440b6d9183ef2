#pragma once

#include <vector>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// Predicted seconds of one rank.
struct RankTimeline {
  double compute = 0;   ///< copies, blocks and reductions
  double transfer = 0;  ///< messages, hidden or not
  double exposed = 0;   ///< waiting for messages with nothing to compute
  double finish = 0;
};

/// Plays a plan task by task, as the runner executes it: computing tasks run in the order of the
/// list, and so do the exchanges of a group, each once its dependencies are met. When a transfer
/// starts depends on the model's transport: when both sides are ready, or when the receiver is
/// ready and the sender has offered; between hosts, not before the computation that precedes it in
/// the list is done. The messages of one rank in one exchange follow each other; otherwise links
/// have no contention. In a sample of a mesh, ranks that are left out are assumed to be as far as
/// the ranks that they exchange with.
[[nodiscard]] std::vector<RankTimeline> simulate(const Plan& plan, const Prices& prices);

/// The finish of the slowest rank.
[[nodiscard]] double predicted_seconds(const Plan& plan, const Prices& prices);

}  // namespace annulus::ring
