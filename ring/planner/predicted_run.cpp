#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string>
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

struct Traffic {
  double received = 0;
  double across = 0;
};

// Bytes that a rank receives.
Traffic traffic_of(const RankPlan& rank, const Prices& prices) {
  Traffic bytes;
  const int node = prices.node_of(rank.rank);
  for (const Exchange* exchange : rank.all<Exchange>()) {
    const std::vector<int>& ranks = rank.groups[static_cast<std::size_t>(exchange->group)].ranks;
    for (const Transfer& transfer : exchange->receives) {
      const auto received = static_cast<double>(transfer.bytes);
      bytes.received += received;
      const int peer = ranks[static_cast<std::size_t>(transfer.peer)];
      if (prices.node_of(peer) != node) bytes.across += received;
    }
  }
  return bytes;
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
  // The ranks to simulate, and for each the first rank with the same plan: see KvGroups::alike().
  struct Ranks {
    std::vector<int> numbers;
    std::vector<std::size_t> alike;
  };

  KvGroups groups;
  Ranks ranks;
  int busiest;
  Ranks sample = {};  // only of a large mesh whose ranks are all simulated

  std::optional<PredictedRun> run(const PlanInput& input, const ScheduleVariant& variant,
                                  const Ranks& of, double limit) {
    PredictedRun run;
    Simulation simulation(input.prices, variant_text(variant));
    std::vector<std::optional<Traffic>> shared;  // by rank, if others have the same plan
    for (std::size_t i = 0; i < of.numbers.size(); ++i) {
      const std::size_t first = of.alike[i];
      std::optional<Traffic>& known = shared.emplace_back();
      Traffic traffic;
      if (shared[first]) {
        simulation.add_alike(first, of.numbers[i]);
        traffic = *shared[first];
      } else {
        const RankPlan plan = groups.plan(input, variant.schedule, of.numbers[i]);
        if (simulation.add(plan) > limit) return std::nullopt;
        add_memory(run, plan);
        traffic = traffic_of(plan, input.prices);
        if (plan.groups.size() == 1) known = traffic;
      }
      run.received_bytes += traffic.received;
      run.across_bytes += traffic.across;
    }
    const std::vector<RankTimeline> timelines = simulation.run(limit);
    if (timelines.empty()) return std::nullopt;
    for (const RankTimeline& timeline : timelines) {
      run.seconds = std::max(run.seconds, timeline.finish);
    }
    const double scale = static_cast<double>(input.operands.key.mesh().ranks()) /
                         static_cast<double>(of.numbers.size());
    run.received_bytes *= scale;
    run.across_bytes *= scale;
    return run;
  }
};

Predictor::Predictor(const PlanInput& input) : Predictor(input, simulated_ranks(input)) {}

Predictor::Predictor(const PlanInput& input, std::vector<int> ranks) {
  const int busiest = busiest_rank(input, ranks);
  impl_ = std::make_unique<Impl>(Impl{KvGroups(input), {}, busiest});
  const auto find_alike = [&](std::vector<int> numbers) {
    std::vector<std::size_t> alike = impl_->groups.alike(input.prices, numbers);
    return Impl::Ranks{std::move(numbers), std::move(alike)};
  };
  const auto simulated = static_cast<int>(ranks.size());
  impl_->ranks = find_alike(std::move(ranks));
  if (simulated >= kLargeMesh && simulated == input.operands.key.mesh().ranks()) {
    impl_->sample = find_alike(simulated_ranks(input, 0));
  }
}

Predictor::~Predictor() = default;

const std::vector<int>& Predictor::ranks() const noexcept {
  return impl_->ranks.numbers;
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
  if (impl_->sample.numbers.empty()) return least;
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

std::string milliseconds_text(double seconds) {
  const double ms = seconds * 1e3;
  return ms >= 1000 ? fmt::format("{:.0f} ms", ms) : fmt::format("{:.3g} ms", ms);
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
