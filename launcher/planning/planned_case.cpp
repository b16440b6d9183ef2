#include "launcher/planning/planned_case.hpp"

#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/mesh/peer_reach.hpp>
#include <annulus/mesh/transport.hpp>

#include "launcher/setup/cost_model_option.hpp"

namespace annulus::launcher {

Place planned_place(const Options& options) {
  return options.device == "cuda" ? Place::cuda(0) : Place::host();
}

std::vector<int> planned_nodes(const Options& options, const MeshShape& mesh) {
  constexpr const char* kNodeAxis = "node";
  const int ranks = mesh.ranks();
  std::vector<int> nodes;
  if (options.ranks_per_node > 0) {
    if (ranks > options.ranks_per_node && ranks % options.ranks_per_node != 0) {
      throw ArgumentError("--ranks-per-node", std::to_string(options.ranks_per_node),
                          fmt::format("a divisor of the mesh's {} ranks", ranks));
    }
    if (ranks <= options.ranks_per_node) return nodes;
    for (int rank = 0; rank < ranks; ++rank) nodes.push_back(rank / options.ranks_per_node);
  } else if (mesh.has_axis(kNodeAxis) && mesh.axis_size(kNodeAxis) > 1) {
    for (int rank = 0; rank < ranks; ++rank) nodes.push_back(mesh.coordinate(rank, kNodeAxis));
  }
  return nodes;
}

ring::PlanInput PlannedCase::input(const ring::ShardedOperands& laid_out) const {
  ring::PlanInput made =
      ring::make_plan_input(setup.problem, laid_out, candidates, place, model, how);
  made.prices.node_of_rank = node_of_rank;
  return made;
}

namespace {

// How far ranks that exchange keys and values reach, if those of a node reach each other. Of real
// ranks, Mesh finds it out.
PeerExtent extent_inside_nodes(const NamedSharding& key, const std::vector<int>& node_of_rank) {
  std::vector<PeerExtent> extents;
  for (int rank = 0; rank < key.mesh().ranks(); ++rank) {
    if (key.coordinate(rank, 1) != 0) continue;
    PeerReach reach;
    std::map<int, int> islands;  // by node
    for (const int member : key.mesh().group(rank, key.spec()[1])) {
      const int node = node_of_rank[static_cast<std::size_t>(member)];
      const auto island = islands.try_emplace(node, static_cast<int>(islands.size())).first;
      reach.island_of_rank.push_back(island->second);
    }
    extents.push_back(reach.extent());
  }
  return joint(extents);
}

// A transport that the model prefers but that stays inside a node gives way to what ranks on
// several nodes take; one that is named is refused.
void settle_transport(ring::CostModel& model, const Options& options, const NamedSharding& key,
                      const std::vector<int>& node_of_rank) {
  if (node_of_rank.empty() || model.transport != annulus::name_of(Transport::peer)) return;
  const PeerExtent extent = extent_inside_nodes(key, node_of_rank);
  if (options.transport == Transport::automatic) {
    model.adopt_transport(annulus::name_of(device_transports(extent).front()));
  } else if (extent != PeerExtent::all) {
    throw ArgumentError("--transport", "peer",
                        fmt::format("auto, composite or nccl: ranks along {} are on different "
                                    "nodes, and copies stay inside one",
                                    to_string(key.spec()[1])));
  }
}

// Who may compute the problem. The machine that computes need not be this one.
Selection select(const Options& options, const PlannedCase& planned, const Registry& registry) {
  return registry.select(options.implementation, planned.setup.problem, planned.place,
                         Presence::assumed);
}

PlannedCase lay_out(const Options& options) {
  if (!options.shape) {
    throw ArgumentError("--shape", "nothing", "B,T,S,N,K,D or B,T,S,N,K,D,Dv");
  }
  ProblemSetup setup =
      set_up_problem(options, *options.shape, options.dtype.value_or(DType::float32), /*ranks=*/0);
  ring::ShardedOperands operands = shard_operands(setup);
  const Place place = planned_place(options);
  std::vector<int> nodes = planned_nodes(options, setup.mesh);
  ring::CostModel model = cost_model_of(options, place);
  settle_transport(model, options, operands.key, nodes);
  const ring::PlanOptions how = plan_options(setup.problem, place);
  return {std::move(setup), std::move(operands), {},  place,
          std::move(model), std::move(nodes),    how, {}};
}

}  // namespace

std::string predictor_text(const ring::CostModel& model, const std::set<std::string>& transports) {
  if (transports.empty()) return model.source;
  return fmt::format("{}, {}", model.source, fmt::join(transports, " and "));
}

PlannedCase lay_out_case(const Options& options, const Registry& registry) {
  PlannedCase planned = lay_out(options);
  planned.candidates = select(options, planned, registry).candidates;
  return planned;
}

void settle_schedule(PlannedCase& planned, const Options& options, const Registry& registry) {
  check_choices(planned.setup.problem, planned.operands, registry, planned.place,
                Presence::assumed);
  const Selection selection = select(options, planned, registry);
  planned.choice = ring::choose_schedule(planned.input(), selection.schedule_for(options.schedule));
  planned.how = ring::with_variant(planned.how, planned.choice);
}

}  // namespace annulus::launcher
