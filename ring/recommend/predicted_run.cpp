#include <algorithm>
#include <cstddef>
#include <map>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/simulate.hpp>

namespace annulus::ring {
namespace {

void add_traffic(PredictedRun& run, const RankPlan& rank, const Prices& prices) {
  const int node = prices.node_of(rank.rank);
  for (const Exchange* exchange : rank.all<Exchange>()) {
    const std::vector<int>& ranks = rank.groups[static_cast<std::size_t>(exchange->group)].ranks;
    for (const Transfer& transfer : exchange->receives) {
      const auto received = static_cast<double>(transfer.bytes);
      run.received_bytes += received;
      const int peer = ranks[static_cast<std::size_t>(transfer.peer)];
      if (prices.node_of(peer) != node) run.across_bytes += received;
    }
  }
}

// The peer extent of ranks that exchange keys and values, assuming that the ranks of a node reach
// each other. For real ranks, Mesh finds it out.
PeerExtent extent_inside_nodes(const NamedSharding& key, const std::vector<int>& node_of_rank) {
  std::vector<PeerExtent> extents;
  for (int rank = 0; rank < key.mesh().ranks(); ++rank) {
    if (key.coordinate(rank, 1) != 0) continue;
    PeerReach reach;
    std::map<int, int> cliques;  // by node
    for (const int member : key.mesh().group(rank, key.spec()[1])) {
      const int node = node_of_rank[static_cast<std::size_t>(member)];
      const auto clique = cliques.try_emplace(node, static_cast<int>(cliques.size())).first;
      reach.clique_of_rank.push_back(clique->second);
    }
    extents.push_back(reach.extent());
  }
  return joint(extents);
}

}  // namespace

void add_memory(PredictedRun& run, const RankPlan& rank) {
  const auto bytes = [&](BufferKind kind) { return static_cast<double>(rank.buffer_bytes(kind)); };
  const double shards = bytes(BufferKind::caller);
  const double buffers = bytes(BufferKind::exchange) + bytes(BufferKind::local);
  run.shard_bytes = std::max(run.shard_bytes, shards);
  run.buffer_bytes = std::max(run.buffer_bytes, buffers);
  run.memory_bytes = std::max(run.memory_bytes, shards + buffers);
}

PredictedRun predict_run(const PlanInput& input, const ScheduleVariant& variant,
                         const std::vector<int>& ranks) {
  PredictedRun run;
  Simulation simulation(input.prices, variant_text(variant));
  plan_each(input, variant.schedule, ranks, [&](const RankPlan& rank) {
    add_memory(run, rank);
    add_traffic(run, rank, input.prices);
    simulation.add(rank);
  });
  for (const RankTimeline& timeline : simulation.run()) {
    run.seconds = std::max(run.seconds, timeline.finish);
  }
  const double scale =
      static_cast<double>(input.operands.key.mesh().ranks()) / static_cast<double>(ranks.size());
  run.received_bytes *= scale;
  run.across_bytes *= scale;
  return run;
}

void settle_transport(CostModel& model, Transport asked, const NamedSharding& key,
                      const std::vector<int>& node_of_rank) {
  if (node_of_rank.empty() || model.transport != annulus::name_of(Transport::peer)) return;
  const PeerExtent extent = extent_inside_nodes(key, node_of_rank);
  if (asked == Transport::automatic) {
    model.adopt_transport(annulus::name_of(device_transports(extent).front()));
  } else if (extent != PeerExtent::all) {
    throw ArgumentError("transport", "peer",
                        fmt::format("auto, composite or nccl: ranks along {} are on different "
                                    "nodes, and copies stay inside one",
                                    to_string(key.spec()[1])));
  }
}

}  // namespace annulus::ring
