#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/topology.hpp>
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

// True if the mask is causal from the first position, or hides nothing.
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

// Seconds of the fastest schedule; `limit` if none takes less.
double fastest_schedule(const PlanInput& input, const std::string& schedule, double limit) {
  Predictor predictor(input);
  const auto with = [&](const ScheduleVariant& variant) {
    PlanInput named = input;
    named.options = with_variant(input.options, variant);
    return named;
  };
  std::vector<std::pair<double, ScheduleVariant>> variants;  // with their lower bounds
  for (const ConsideredVariant& one : variants_for(input, schedule)) {
    if (!one.obstacle.empty() || !one.pointless.empty()) continue;
    try {
      const PredictedRun least = predictor.least(with(one.variant), one.variant);
      variants.emplace_back(least.seconds, one.variant);
    } catch (const UnsupportedError&) {
      continue;  // kernels refuse it
    }
  }
  std::stable_sort(variants.begin(), variants.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [least, variant] : variants) {
    if (least > limit) break;
    try {
      const std::optional<PredictedRun> run = predictor.run(with(variant), variant, limit);
      if (run) limit = std::min(limit, run->seconds);
    } catch (const UnsupportedError&) {
      continue;  // kernels refuse blocks of a rank with less work
    }
  }
  return limit;
}

double predicted_seconds(const PlannedProblem& planned, const MeshShape& mesh, LayoutKind layout,
                         double limit) {
  LayoutOptions asked = planned.options();
  asked.layout = layout;
  const LaidOut laid_out = planned.lay_out(mesh, asked);
  return fastest_schedule(planned.input(laid_out), planned.schedule(), limit);
}

struct PricedLayout {
  LayoutKind layout;
  double seconds;  // a lower bound unless known; kEndless if no schedule can run
  bool is_known;
};

// "0.728 ms".
std::string text_of(const PricedLayout& one) {
  if (!one.is_known && one.seconds == kEndless) return "cannot run";
  return fmt::format("{}{:.3g} ms", one.is_known ? "" : "more than ", one.seconds * 1e3);
}

LayoutChoice choose(const PlannedProblem& planned, const MeshShape& mesh) {
  OpenLayouts open = open_layouts(planned.options(), mesh, planned.options());
  if (!open.why_one.empty()) return {open.layouts.front(), std::move(open.why_one)};
  const LayoutKind usual = open.layouts.front();
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
          const bool ties = one.layout == usual && one.is_known && one.seconds <= fastest * kTie;
          return std::pair(ties ? 0 : one.is_known ? 1 : 2, one.seconds);
        };
        return rank(a) < rank(b);
      });
  LayoutChoice choice{fastest < kEndless ? chosen->layout : usual, {}};
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

LayoutChoice choose_layout(const AttentionOptions& problem, Context& context) {
  Control& world = context.mesh().world();
  LayoutChoice choice = collectively(world, "sequence layout", [&] {
    const Computing computing = world.computing();
    const Topology& topology = context.mesh().topology();
    AttentionOptions asked = problem;
    if (asked.transport == Transport::automatic) asked.transport = context.transport();
    // By every rank, so that all have the errors of all alike.
    const PlannedProblem planned(asked, context.registry(), context.place(), Presence::required,
                                 topology.nodes() > 1 ? topology.node_of_rank : std::vector<int>());
    return context.rank() == 0 ? choose(planned, context.mesh().shape()) : LayoutChoice{};
  });
  const std::string text = world.broadcast(
      fmt::format("{} {}", annulus::name_of(choice.layout), choice.why), "sequence layout");
  const std::size_t space = text.find(' ');
  return {parse_layout(text.substr(0, space)), text.substr(space + 1)};
}

}  // namespace annulus::ring
