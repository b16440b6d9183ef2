#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/topology.hpp>
#include <annulus/mesh/transport_traits.hpp>
#include <annulus/ring/balance.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "recommend/planned_problem.hpp"

namespace annulus::ring {
namespace {

constexpr std::int64_t kFewestRows = 256;  // per rank
constexpr double kEven = 0.01;

// True if the mask is only causal, with as many queries as keys and no offset, or if it hides
// nothing.
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

constexpr double kEndless = std::numeric_limits<double>::infinity();

double predicted_seconds(const PlannedProblem& planned, const MeshShape& mesh, LayoutKind layout,
                         double limit) {
  LayoutOptions asked = planned.options();
  asked.layout = layout;
  const LaidOut laid_out = planned.lay_out(mesh, asked);
  const auto fastest = VariantSearch(planned.input(laid_out), planned.schedule()).fastest(limit);
  return fastest ? fastest->second.seconds : limit;
}

struct PricedLayout {
  LayoutKind layout;
  double seconds;  // a lower bound unless known; kEndless if no schedule can run
  bool is_known;
};

// "0.728 ms".
std::string text_of(const PricedLayout& one) {
  if (!one.is_known && one.seconds == kEndless) return "cannot run";
  return (one.is_known ? "" : "more than ") + milliseconds_text(one.seconds);
}

LayoutChoice choose(const PlannedProblem& planned, const MeshShape& mesh) {
  OpenLayouts open = open_layouts(planned.options(), mesh, planned.options());
  if (!open.why_one.empty()) return {open.layouts.front(), std::move(open.why_one)};
  const LayoutKind by_default = open.layouts.front();
  // Balanced rows take longest to plan, so they come last, when there is a limit.
  std::stable_partition(open.layouts.begin(), open.layouts.end(),
                        [](LayoutKind layout) { return layout != LayoutKind::balanced; });
  std::vector<PricedLayout> priced;
  double fastest = kEndless;
  for (const LayoutKind layout : open.layouts) {
    const double limit = fastest * kTie;
    PricedLayout& one = priced.emplace_back(PricedLayout{layout, kEndless, false});
    try {
      one.seconds = predicted_seconds(planned, mesh, layout, limit);
      one.is_known = one.seconds < limit;
      if (one.is_known) fastest = std::min(fastest, one.seconds);
    } catch (const UserError&) {
      continue;  // no schedule takes this layout
    }
  }
  const auto chosen = std::min_element(
      priced.begin(), priced.end(), [&](const PricedLayout& a, const PricedLayout& b) {
        const auto rank = [&](const PricedLayout& one) {
          const bool ties =
              one.layout == by_default && one.is_known && one.seconds <= fastest * kTie;
          return std::pair(ties ? 0 : one.is_known ? 1 : 2, one.seconds);
        };
        return rank(a) < rank(b);
      });
  LayoutChoice choice{fastest < kEndless ? chosen->layout : by_default, {}};
  for (const PricedLayout& one : priced) {
    if (one.layout == choice.layout) choice.why = "predicted " + text_of(one);
  }
  for (const PricedLayout& one : priced) {
    if (one.layout == choice.layout) continue;
    choice.why += fmt::format(", {} {}", annulus::name_of(one.layout), text_of(one));
  }
  return choice;
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

LayoutChoice choose_layout(const AttentionOptions& options, const MeshShape& mesh,
                           const std::vector<int>& node_of_rank, Place place,
                           const Registry& registry, Presence presence) {
  return choose(PlannedProblem(options, registry, place, presence, node_of_rank), mesh);
}

namespace {

// The options as Attention takes them on this context: with its overlays, and with a cost model for
// its number of threads.
AttentionOptions on_context(AttentionOptions options, const Context& context) {
  if (options.transport == Transport::automatic) options.transport = context.transport();
  static_cast<Choice&>(options) = nested(context.overlay(), options);
  CostModel model =
      options.cost_model ? *options.cost_model : CostModel::for_place(context.place());
  model.use_threads(context.threads());
  options.cost_model = std::make_shared<CostModel>(std::move(model));
  return options;
}

}  // namespace

LayoutChoice choose_layout(const AttentionOptions& problem, Context& context) {
  Mesh& mesh = context.mesh();
  Control& world = mesh.world();
  AttentionOptions asked = on_context(problem, context);
  const AxisNames axes = collectively(
      world, "sequence layout", [&] { return default_layout(problem, mesh.shape(), asked).kv[1]; });
  const std::string carrier = mesh.group(axes, context.place(), asked.transport).transport();
  for (const Transport transport : device_transports()) {
    if (carrier == annulus::name_of(transport)) asked.transport = transport;
  }
  LayoutChoice choice = collectively(world, "sequence layout", [&] {
    const Computing computing = world.computing();
    const Topology& topology = mesh.topology();
    // Every rank computes it, so that all ranks get the same errors.
    const PlannedProblem planned(asked, context.registry(), context.place(), Presence::required,
                                 topology.nodes() > 1 ? topology.node_of_rank : std::vector<int>());
    return context.rank() == 0 ? choose(planned, mesh.shape()) : LayoutChoice{};
  });
  const std::string text = world.broadcast(
      fmt::format("{} {}", annulus::name_of(choice.layout), choice.why), "sequence layout");
  const std::size_t space = text.find(' ');
  return {parse_layout(text.substr(0, space)), text.substr(space + 1)};
}

}  // namespace annulus::ring
