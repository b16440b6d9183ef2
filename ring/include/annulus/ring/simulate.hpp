#pragma once

#include <vector>

#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// Predicted seconds of one rank.
struct RankTimeline {
  double compute = 0;   ///< kernels and merges
  double transfer = 0;  ///< messages, hidden or not
  double exposed = 0;   ///< waiting for messages with nothing to compute
  double finish = 0;
};

/// Plays a plan step by step: a rank computes a step's blocks while its transfers run, a transfer
/// starts when both sides have reached its step, and the next step starts when both have finished.
/// Messages of one rank share its bandwidth; links are otherwise free of contention.
[[nodiscard]] std::vector<RankTimeline> simulate(const Plan& plan, const CostModel& model);

/// The finish of the slowest rank.
[[nodiscard]] double predicted_seconds(const Plan& plan, const CostModel& model);

}  // namespace annulus::ring
