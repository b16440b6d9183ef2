#pragma once

#include <vector>

#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

namespace annulus::launcher {

/// What a plan is predicted to take.
struct PredictedRun {
  double seconds = 0;         ///< of the slowest rank
  double shard_bytes = 0;     ///< of the caller's tensors, of the rank with most
  double buffer_bytes = 0;    ///< of the plan's buffers, of the rank with most
  double memory_bytes = 0;    ///< of both together, of the rank with most
  double received_bytes = 0;  ///< by all ranks
  double across_bytes = 0;    ///< of these, from other nodes
};

/// Adds a rank's shards and buffers.
void add_memory(PredictedRun& run, const ring::RankPlan& rank);

/// Of some ranks of the mesh: what all receive is estimated from them.
[[nodiscard]] PredictedRun predict_run(const ring::PlanInput& input,
                                       const ring::ScheduleVariant& variant,
                                       const std::vector<int>& ranks);

}  // namespace annulus::launcher
