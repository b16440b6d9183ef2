#include "launcher/planning/predicted_run.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace annulus::launcher {

PredictedRun predict_run(const ring::PlanInput& input, ring::Schedule schedule) {
  const ring::Plan plan =
      ring::make_plan(input, schedule, ring::sample_ranks(input, kPredictedRanks));
  PredictedRun run;
  run.seconds = ring::predicted_seconds(plan, input.prices);
  for (const ring::RankPlan& rank : plan.ranks) {
    const auto bytes = [&](ring::BufferKind kind) {
      return static_cast<double>(rank.buffer_bytes(kind));
    };
    const double shards = bytes(ring::BufferKind::caller);
    const double buffers = bytes(ring::BufferKind::exchange) + bytes(ring::BufferKind::local);
    run.shard_bytes = std::max(run.shard_bytes, shards);
    run.buffer_bytes = std::max(run.buffer_bytes, buffers);
    run.memory_bytes = std::max(run.memory_bytes, shards + buffers);
    const int node = input.prices.node_of(rank.rank);
    for (const ring::Exchange* exchange : rank.all<ring::Exchange>()) {
      const std::vector<int>& ranks = rank.groups[static_cast<std::size_t>(exchange->group)].ranks;
      for (const ring::Transfer& transfer : exchange->receives) {
        const auto received = static_cast<double>(transfer.bytes);
        run.received_bytes += received;
        const int peer = ranks[static_cast<std::size_t>(transfer.peer)];
        if (input.prices.node_of(peer) != node) run.across_bytes += received;
      }
    }
  }
  // Of a sample, what all ranks receive is estimated.
  const double scale =
      static_cast<double>(plan.mesh.ranks()) / static_cast<double>(plan.ranks.size());
  run.received_bytes *= scale;
  run.across_bytes *= scale;
  return run;
}

}  // namespace annulus::launcher
