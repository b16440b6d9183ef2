#pragma once

#include <vector>

#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Predicted seconds of one rank.
struct RankTimeline {
  double compute = 0;   ///< copies, blocks and reductions
  double transfer = 0;  ///< messages, hidden or not
  double exposed = 0;   ///< waiting for messages with nothing to compute
  double finish = 0;
};

/// Plays a plan as the runner obeys it, task by task: what computes runs in the order of the list,
/// and so do the exchanges of a group, each when what it waits for is there. A transfer starts by
/// the ways of the model's transport: when both sides are ready, or when the receiver is ready and
/// the sender has offered; between hosts no earlier than the computation before it in the list is
/// done. Messages of one rank and exchange follow each other; links are otherwise free of
/// contention. In a sample of a mesh, ranks that are left out are as far as those that they meet.
[[nodiscard]] std::vector<RankTimeline> simulate(const Plan& plan, const CostModel& model);

/// The finish of the slowest rank.
[[nodiscard]] double predicted_seconds(const Plan& plan, const CostModel& model);

}  // namespace annulus::ring
