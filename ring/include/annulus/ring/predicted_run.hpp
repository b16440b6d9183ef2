#pragma once

#include <vector>

#include <annulus/mesh/transport.hpp>
#include <annulus/ring/planner.hpp>

namespace annulus::ring {

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
