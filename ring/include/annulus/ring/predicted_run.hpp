#pragma once

#include <vector>

#include <annulus/mesh/transport.hpp>
#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// The predicted time and memory of a plan.
struct PredictedRun {
  double seconds = 0;         ///< of the slowest rank
  double shard_bytes = 0;     ///< of the caller's tensors, of the rank with most
  double buffer_bytes = 0;    ///< of the plan's buffers, of the rank with most
  double memory_bytes = 0;    ///< of both together, of the rank with most
  double received_bytes = 0;  ///< by all ranks
  double across_bytes = 0;    ///< of these, from other nodes
};

/// Adds a rank's shards and buffers.
void add_memory(PredictedRun& run, const RankPlan& rank);

/// Predicts a run from some ranks of the mesh, from which the bytes that all ranks receive are
/// estimated.
[[nodiscard]] PredictedRun predict_run(const PlanInput& input, const ScheduleVariant& variant,
                                       const std::vector<int>& ranks);

/// If the model's transport stays inside a node, and ranks are on several (see Prices; empty: one
/// node), sets the transport that such ranks take. Throws ArgumentError("transport", …) if the
/// caller named the transport.
void settle_transport(CostModel& model, Transport asked, const NamedSharding& key,
                      const std::vector<int>& node_of_rank);

}  // namespace annulus::ring
