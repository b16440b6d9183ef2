#pragma once

#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

namespace annulus::launcher {

/// What a plan is predicted to take, from a sample of its ranks.
struct PredictedRun {
  double seconds = 0;         ///< of the slowest rank
  double shard_bytes = 0;     ///< of the caller's tensors, of the rank with most
  double buffer_bytes = 0;    ///< of the plan's buffers, of the rank with most
  double memory_bytes = 0;    ///< of both together, of the rank with most
  double received_bytes = 0;  ///< by all ranks
  double across_bytes = 0;    ///< of these, from other nodes
};

/// Most ranks whose plans are made.
inline constexpr int kPredictedRanks = 24;

[[nodiscard]] PredictedRun predict_run(const ring::PlanInput& input, ring::Schedule schedule);

}  // namespace annulus::launcher
