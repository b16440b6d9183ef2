#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/balance.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>

namespace annulus::ring {
namespace {

constexpr std::int64_t kFewestRows = 256;  // per rank
constexpr double kEven = 0.01;

// Causal from the first position, or everything visible.
bool is_plain(const AttentionProblem& problem) {
  const Mask& mask = problem.mask;
  const PositionParts& parts = mask.position_parts();
  return !mask.has_segments() && mask.query_lengths().empty() && mask.kv_lengths().empty() &&
         !mask.block_mask() && !mask.has_prefix() && !parts.window() && parts.chunk == 0 &&
         (!parts.causal || (problem.shape.query_length == problem.shape.kv_length &&
                            mask.offset() == 0 && mask.offsets().empty()));
}

// Empty if other layouts may be better.
std::string why_default(const AttentionProblem& problem, const MeshShape& mesh,
                        const LayoutOptions& asked, const OperandLayout& layout) {
  if (asked.layout) return "as asked";
  if (asked.kv_layout) return "the default, as the layout of keys is given";
  const int shards = std::max(mesh.size(layout.query[1]), mesh.size(layout.kv[1]));
  if (shards == 1) return "the sequence is not sharded";
  if (problem.shape.query_length < kFewestRows * shards) {
    return fmt::format("the default; with fewer than {} queries per rank, layouts hardly matter",
                       kFewestRows);
  }
  if (!is_plain(problem)) return {};
  return problem.mask.causal() ? "equal work for every rank under a causal mask"
                               : "equal work for every rank, as nothing is hidden";
}

double predicted_seconds(const AttentionOptions& problem, const MeshShape& mesh, LayoutKind layout,
                         const std::vector<int>& node_of_rank, Place place,
                         const Registry& registry, Presence presence) {
  LayoutOptions asked = problem;
  asked.layout = layout;
  const ShardedOperands operands =
      shard_operands(problem, mesh, default_layout(problem, mesh, asked));
  CostModel model = problem.cost_model.value_or(CostModel::for_place(place));
  if (!place.is_host() && problem.transport != Transport::automatic) {
    model.adopt_transport(annulus::name_of(problem.transport));
  }
  settle_transport(model, problem.transport, operands.key, node_of_rank);
  const auto named = [](const std::string& name) { return name.empty() ? "auto" : name; };
  const Selection selection =
      registry.select(named(problem.implementation), problem, place, presence);
  PlanInput input = make_plan_input(problem, operands, selection.candidates, place,
                                    std::move(model), plan_options(problem, place));
  input.prices.node_of_rank = node_of_rank;
  return choose_schedule(input, selection.schedule_for(named(problem.schedule))).seconds;
}

}  // namespace

OpenLayouts open_layouts(const AttentionProblem& problem, const MeshShape& mesh,
                         const LayoutOptions& asked) {
  const OperandLayout layout = default_layout(problem, mesh, asked);
  OpenLayouts open{{layout.sequence}, why_default(problem, mesh, asked, layout)};
  if (!open.why_one.empty()) return open;
  const auto add = [&](LayoutKind kind) {
    if (kind != layout.sequence) open.layouts.push_back(kind);
  };
  add(LayoutKind::contiguous);
  add(LayoutKind::zigzag);
  const std::optional<double> uneven =
      tile_imbalance(problem, shard_operands(problem, mesh, layout).query);
  if (uneven && *uneven >= kEven) add(LayoutKind::balanced);
  return open;
}

LayoutChoice choose_layout(const AttentionOptions& problem, const MeshShape& mesh,
                           const std::vector<int>& node_of_rank, Place place,
                           const Registry& registry, Presence presence) {
  OpenLayouts open = open_layouts(problem, mesh, problem);
  if (!open.why_one.empty()) return {open.layouts.front(), std::move(open.why_one)};
  const auto seconds_of = [&](LayoutKind layout) {
    try {
      return predicted_seconds(problem, mesh, layout, node_of_rank, place, registry, presence);
    } catch (const UserError&) {
      return std::numeric_limits<double>::infinity();  // no schedule takes this layout
    }
  };
  std::vector<std::pair<LayoutKind, double>> priced;
  for (const LayoutKind layout : open.layouts) priced.emplace_back(layout, seconds_of(layout));
  const auto faster = [](const auto& a, const auto& b) { return a.second < b.second; };
  const auto fastest = std::min_element(priced.begin(), priced.end(), faster);
  if (priced.front().second > fastest->second * kTie) std::iter_swap(priced.begin(), fastest);
  std::stable_sort(priced.begin() + 1, priced.end(), faster);
  LayoutChoice choice{priced.front().first, {}};
  for (const auto& [layout, seconds] : priced) {
    const bool first = choice.why.empty();
    const std::string time = seconds < std::numeric_limits<double>::infinity()
                                 ? fmt::format("{:.3g} ms", seconds * 1e3)
                                 : "cannot run";
    choice.why +=
        first ? "predicted " + time : fmt::format(", {} {}", annulus::name_of(layout), time);
  }
  return choice;
}

LayoutChoice choose_layout(const AttentionOptions& problem, Context& context) {
  Control& world = context.mesh().world();
  LayoutChoice choice = collectively(world, "sequence layout", [&] {
    const Computing computing = world.computing();
    if (context.rank() != 0) return LayoutChoice{};
    const Topology& topology = context.mesh().topology();
    AttentionOptions asked = problem;
    if (asked.transport == Transport::automatic) asked.transport = context.transport();
    return choose_layout(asked, context.mesh().shape(),
                         topology.nodes() > 1 ? topology.node_of_rank : std::vector<int>(),
                         context.place(), context.registry(), Presence::required);
  });
  const std::string text = world.broadcast(
      fmt::format("{} {}", annulus::name_of(choice.layout), choice.why), "sequence layout");
  const std::size_t space = text.find(' ');
  return {parse_layout(text.substr(0, space)), text.substr(space + 1)};
}

}  // namespace annulus::ring
