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

/// Predicts a run from some ranks of the mesh: the bytes that all receive are estimated from them.
[[nodiscard]] PredictedRun predict_run(const PlanInput& input, const ScheduleVariant& variant,
                                       const std::vector<int>& ranks);

/// Gives a model the transport that ranks on these nodes (see Prices; empty for one node) take
/// where its own stays inside a node. Throws ArgumentError("transport", …) if that one was asked
/// for.
void settle_transport(CostModel& model, Transport asked, const NamedSharding& key,
                      const std::vector<int>& node_of_rank);

}  // namespace annulus::ring
