#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/simulate.hpp>

#include "planner/all_ranks.hpp"
#include "planner/kv_groups.hpp"

namespace annulus::ring {
namespace {

// From this number of ranks on, simulating all of them takes so long that a sample is simulated
// first.
constexpr int kLargeMesh = 257;

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

void add_memory(PredictedRun& run, const RankPlan& rank) {
  const auto bytes = [&](BufferKind kind) { return static_cast<double>(rank.buffer_bytes(kind)); };
  const double shards = bytes(BufferKind::caller);
  const double buffers = bytes(BufferKind::exchange) + bytes(BufferKind::local);
  run.shard_bytes = std::max(run.shard_bytes, shards);
  run.buffer_bytes = std::max(run.buffer_bytes, buffers);
  run.memory_bytes = std::max(run.memory_bytes, shards + buffers);
}

// The peer extent of ranks that exchange keys and values, assuming that the ranks of a node reach
// each other. For real ranks, Mesh knows it.
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

// All ranks of some nodes, including the busiest rank's, so that the ranks of a node share its
// network as in the whole mesh. Nothing if a node has more than `most` ranks.
std::vector<int> sample_nodes(const PlanInput& input, int most) {
  const std::vector<int>& node_of_rank = input.prices.node_of_rank;
  std::map<int, std::vector<int>> nodes;
  for (std::size_t r = 0; r < node_of_rank.size(); ++r) {
    nodes[node_of_rank[r]].push_back(static_cast<int>(r));
  }
  std::size_t largest = 1;
  for (const auto& [node, ranks] : nodes) largest = std::max(largest, ranks.size());
  const auto wanted =
      std::min(static_cast<std::int64_t>(nodes.size()),
               static_cast<std::int64_t>(most) / static_cast<std::int64_t>(largest));
  if (wanted < 1) return {};
  const int busiest = busiest_rank(input, all_ranks(input));
  std::set<int> chosen{node_of_rank[static_cast<std::size_t>(busiest)]};
  const auto last = static_cast<std::int64_t>(nodes.size()) - 1;
  for (std::int64_t i = 0; static_cast<std::int64_t>(chosen.size()) < wanted && i < wanted; ++i) {
    chosen.insert(std::next(nodes.begin(), wanted == 1 ? 0 : i * last / (wanted - 1))->first);
  }
  std::vector<int> sample;
  for (const int node : chosen) {
    sample.insert(sample.end(), nodes[node].begin(), nodes[node].end());
  }
  std::sort(sample.begin(), sample.end());
  return sample;
}

}  // namespace

std::vector<int> simulated_ranks(const PlanInput& input, int all, int most) {
  const int ranks = input.operands.key.mesh().ranks();
  if (ranks <= std::max(all, most)) return all_ranks(input);
  if (!input.prices.node_of_rank.empty()) {
    std::vector<int> nodes = sample_nodes(input, most);
    if (!nodes.empty()) return nodes;
  }
  std::set<int> sample{busiest_rank(input, all_ranks(input))};
  const int spread = most - 1;
  for (int i = 0; i < spread; ++i) {
    sample.insert(spread == 1 ? 0 : static_cast<int>(std::int64_t{i} * (ranks - 1) / (spread - 1)));
  }
  return {sample.begin(), sample.end()};
}

struct Predictor::Impl {
  KvGroups groups;
  std::vector<int> ranks;
  int busiest;
  std::vector<int> sample = {};  // ranks that are simulated first; only for a large mesh

  std::optional<PredictedRun> run(const PlanInput& input, const ScheduleVariant& variant,
                                  const std::vector<int>& of, double limit) {
    PredictedRun run;
    Simulation simulation(input.prices, variant_text(variant));
    for (const int rank : of) {
      const RankPlan plan = groups.plan(input, variant.schedule, rank);
      add_memory(run, plan);
      add_traffic(run, plan, input.prices);
      if (simulation.add(plan) > limit) return std::nullopt;
    }
    const std::vector<RankTimeline> timelines = simulation.run(limit);
    if (timelines.empty()) return std::nullopt;
    for (const RankTimeline& timeline : timelines) {
      run.seconds = std::max(run.seconds, timeline.finish);
    }
    const double scale =
        static_cast<double>(input.operands.key.mesh().ranks()) / static_cast<double>(of.size());
    run.received_bytes *= scale;
    run.across_bytes *= scale;
    return run;
  }
};

Predictor::Predictor(const PlanInput& input) : Predictor(input, simulated_ranks(input)) {}

Predictor::Predictor(const PlanInput& input, std::vector<int> ranks) {
  const int busiest = busiest_rank(input, ranks);
  impl_ = std::make_unique<Impl>(Impl{KvGroups(input), std::move(ranks), busiest});
  const auto simulated = static_cast<int>(impl_->ranks.size());
  if (simulated >= kLargeMesh && simulated == input.operands.key.mesh().ranks()) {
    impl_->sample = simulated_ranks(input, 0);
  }
}

Predictor::~Predictor() = default;

const std::vector<int>& Predictor::ranks() const noexcept {
  return impl_->ranks;
}

PredictedRun Predictor::least(const PlanInput& input, const ScheduleVariant& variant) {
  const RankPlan plan = impl_->groups.plan(input, variant.schedule, impl_->busiest);
  PredictedRun run;
  add_memory(run, plan);
  run.seconds = least_seconds(plan, input.prices);
  return run;
}

PredictedRun Predictor::estimate(const PlanInput& input, const ScheduleVariant& variant,
                                 const PredictedRun& least, double limit) {
  if (impl_->sample.empty()) return least;
  const auto sampled = impl_->run(input, variant, impl_->sample, limit * kSampleError);
  if (sampled) return *sampled;
  PredictedRun slow = least;
  slow.seconds = std::numeric_limits<double>::infinity();
  return slow;
}

std::optional<PredictedRun> Predictor::run(const PlanInput& input, const ScheduleVariant& variant,
                                           double limit) {
  return impl_->run(input, variant, impl_->ranks, limit);
}

PredictedRun predict_run(const PlanInput& input, const ScheduleVariant& variant) {
  return *Predictor(input).run(input, variant);
}

void settle_transport(CostModel& model, Transport asked, const NamedSharding& key,
                      const std::vector<int>& node_of_rank) {
  if (asked != Transport::automatic && model.device != Place::Kind::host) {
    model.adopt_transport(annulus::name_of(asked));
  }
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
