#include "launcher/planning/predicted_run.hpp"

#include <algorithm>
#include <cstddef>

namespace annulus::launcher {
namespace {

void add_traffic(PredictedRun& run, const ring::RankPlan& rank, const ring::Prices& prices) {
  const int node = prices.node_of(rank.rank);
  for (const ring::Exchange* exchange : rank.all<ring::Exchange>()) {
    const std::vector<int>& ranks = rank.groups[static_cast<std::size_t>(exchange->group)].ranks;
    for (const ring::Transfer& transfer : exchange->receives) {
      const auto received = static_cast<double>(transfer.bytes);
      run.received_bytes += received;
      const int peer = ranks[static_cast<std::size_t>(transfer.peer)];
      if (prices.node_of(peer) != node) run.across_bytes += received;
    }
  }
}

}  // namespace

void add_memory(PredictedRun& run, const ring::RankPlan& rank) {
  const auto bytes = [&](ring::BufferKind kind) {
    return static_cast<double>(rank.buffer_bytes(kind));
  };
  const double shards = bytes(ring::BufferKind::caller);
  const double buffers = bytes(ring::BufferKind::exchange) + bytes(ring::BufferKind::local);
  run.shard_bytes = std::max(run.shard_bytes, shards);
  run.buffer_bytes = std::max(run.buffer_bytes, buffers);
  run.memory_bytes = std::max(run.memory_bytes, shards + buffers);
}

PredictedRun predict_run(const ring::PlanInput& input, const ring::ScheduleVariant& variant,
                         const std::vector<int>& ranks) {
  PredictedRun run;
  ring::Simulation simulation(input.prices, variant_text(variant));
  ring::plan_each(input, variant.schedule, ranks, [&](const ring::RankPlan& rank) {
    add_memory(run, rank);
    add_traffic(run, rank, input.prices);
    simulation.add(rank);
  });
  for (const ring::RankTimeline& timeline : simulation.run()) {
    run.seconds = std::max(run.seconds, timeline.finish);
  }
  const double scale =
      static_cast<double>(input.operands.key.mesh().ranks()) / static_cast<double>(ranks.size());
  run.received_bytes *= scale;
  run.across_bytes *= scale;
  return run;
}

}  // namespace annulus::launcher
