#include "launcher/planning/planned_case.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/ring/predicted_run.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/options/version.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/hints.hpp"

namespace annulus::launcher {

Place planned_place(const Options& options) {
  return options.device == "cuda" ? Place::cuda(0) : Place::host();
}

std::string assumed_device(const Options& options) {
  if (options.device != "auto") return {};
  const std::string cores =
      !options.cost_model.empty() && options.threads == 0
          ? ""
          : fmt::format(", {} per rank",
                        options.threads > 1 ? counted(options.threads, "thread") : "one core");
  return fmt::format("cpu{}, assumed as --device is not given (--device cuda plans for GPUs)",
                     cores);
}

void add_assumed_device(Report& report, const Options& options) {
  const std::string device = assumed_device(options);
  if (!device.empty()) report.add_meta("device", device);
}

Options with_ranks(Options options) {
  const bool makes_meshes = options.scaling || options.recommend;
  if (makes_meshes && !options.named.contains("mesh")) options.mesh.reset();
  if (options.nodes > 0 && options.ranks_per_node > 0) {
    const std::int64_t product = std::int64_t{options.nodes} * options.ranks_per_node;
    if (product > kMaximumPlannedRanks || (options.ranks > 0 && options.ranks != product)) {
      throw ArgumentError("--nodes", std::to_string(options.nodes),
                          options.ranks > 0
                              ? fmt::format("--ranks {} divided by --ranks-per-node {}",
                                            options.ranks, options.ranks_per_node)
                              : fmt::format("at most {} ranks", kMaximumPlannedRanks));
    }
    options.ranks = static_cast<int>(product);
  }
  if (options.mesh || (options.ranks > 0 && !makes_meshes)) {
    const MeshShape mesh = set_up_mesh(options, options.ranks);
    options.ranks = mesh.ranks();
    options.mesh = to_string(mesh);
  }
  if (options.nodes > 0 && options.ranks > 0) {
    if (options.ranks % options.nodes != 0) {
      throw ArgumentError("--nodes", std::to_string(options.nodes),
                          fmt::format("a divisor of {}", counted(options.ranks, "rank")));
    }
    options.ranks_per_node = options.ranks / options.nodes;
  }
  return options;
}

Record planned_record(const Options& options, const AttentionProblem& problem) {
  return {{"version", std::string(kVersion)},
          {"options", options.given},
          {"shape", shape_cell(problem.shape)},
          {"dtype", std::string(annulus::name_of(problem.dtype))},
          {"mask", mask_cell(problem)},
          {"device", planned_place(options).is_host() ? "cpu" : "cuda"}};
}

std::string predicted_cell(double seconds) {
  const double ms = seconds * 1e3;
  if (ms >= 100) return fmt::format("{:.0f}", ms);
  if (ms >= 10) return fmt::format("{:.1f}", ms);
  return fmt::format("{:.{}f}", ms, ms >= 1 ? 2 : 3);
}

ring::RankTimeline most_of(const std::vector<ring::RankTimeline>& timelines) {
  ring::RankTimeline most;
  for (const ring::RankTimeline& one : timelines) {
    most.compute = std::max(most.compute, one.compute);
    most.transfer = std::max(most.transfer, one.transfer);
    most.exposed = std::max(most.exposed, one.exposed);
    most.finish = std::max(most.finish, one.finish);
  }
  return most;
}

std::string network_text(const ring::CostModel& model, bool several_nodes) {
  if (!several_nodes) return {};
  constexpr double kLarge = 64 << 20;
  const auto giga = [](double rate) {
    return rate < 10e9 ? fmt::format("{:.1f}", rate * 1e-9) : fmt::format("{:.0f}", rate * 1e-9);
  };
  return fmt::format(", between nodes {} GB/s per rank and {} GB/s per node{}",
                     giga(kLarge / model.transfer_seconds(kLarge, true)),
                     giga(model.node_bytes_per_second),
                     model.assumed.contains("network_hops") ? " (assumed)" : "");
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
  ring::PlanInput made = ring::make_plan_input(setup.problem, laid_out, selection.candidates, place,
                                               model, how, backward);
  made.prices.node_of_rank = node_of_rank;
  return made;
}

namespace {

// The implementations for the problem. It need not be this machine that computes.
Selection select(const Options& options, const PlannedCase& planned, const Registry& registry) {
  return registry.select(options.implementation, planned.setup.problem, planned.place,
                         Presence::assumed, planned.backward ? Pass::backward : Pass::forward);
}

PlannedCase lay_out(const Options& options, const Registry& registry) {
  ProblemSetup setup =
      set_up_problem(options, *options.shape, options.dtype.value_or(DType::float32), /*ranks=*/0);
  static_cast<void>(shard_operands(setup));  // throws the errors that name options
  const Place place = planned_place(options);
  std::vector<int> nodes = planned_nodes(options, setup.mesh);
  ring::CostModel model = cost_model_of(options, place);
  setup.problem.transport = options.transport;
  setup.problem.cost_model = std::make_shared<ring::CostModel>(model);
  set_layout(setup, ring::choose_layout(setup.problem, setup.mesh, nodes, place, registry,
                                        Presence::assumed));
  ring::ShardedOperands operands = shard_operands(setup);
  as_option("--transport",
            [&] { ring::settle_transport(model, options.transport, operands.key, nodes); });
  ring::PlanOptions how = plan_options(setup.problem, place);
  how.grad_wire = options.grad_wire;
  PlannedCase planned{std::move(setup), std::move(operands), {},  place,
                      std::move(model), std::move(nodes),    how, {}};
  if (options.backward.value_or(false)) {
    planned.backward.emplace();
    planned.backward->grad_sinks = planned.setup.problem.sinks.has_value();
    planned.backward->grad_bias = planned.setup.problem.bias.has_value();
  }
  return planned;
}

// True if the plain kernel, which takes every problem, computes all blocks.
bool is_all_plain(const ring::Plan& plan) {
  bool any = false;
  for (const ring::RankPlan& rank : plan.ranks) {
    for (const ring::Tile* tile : rank.tiles()) {
      if (rank.implementation_of(*tile) != "native") return false;
      any = true;
    }
  }
  return any;
}

}  // namespace

std::string predictor_text(const ring::CostModel& model, const std::set<std::string>& transports,
                           bool several_nodes) {
  const std::string network = network_text(model, several_nodes);
  if (transports.empty()) return model.source + network;
  return fmt::format("{}, {}{}", model.source, fmt::join(transports, " and "), network);
}

PlannedCase lay_out_case(const Options& options, const Registry& registry) {
  PlannedCase planned = lay_out(options, registry);
  planned.selection = select(options, planned, registry);
  return planned;
}

void settle_schedule(PlannedCase& planned, const Options& options, const Registry& registry) {
  if (planned.backward) {
    as_option("--schedule", [&] { ring::check_schedule(planned.input(), options.schedule); });
  } else {
    check_choices(planned.setup.problem, planned.operands, registry, planned.place,
                  Presence::assumed);
  }
  planned.choice =
      ring::choose_schedule(planned.input(), planned.selection.schedule_for(options.schedule));
  planned.how = ring::with_variant(planned.how, planned.choice);
}

bool adds_rounded_gradients(const ring::Plan& plan) {
  return std::ranges::any_of(plan.ranks, &ring::RankPlan::adds_rounded_gradients);
}

std::vector<std::string> warnings_of(const PlannedCase& planned, const ring::Plan& plan,
                                     const Options& options) {
  std::vector<std::string> warnings = hints_of_choice(
      options, {planned.choice.schedule},
      planned.backward ? std::optional(adds_rounded_gradients(plan)) : std::nullopt);
  if (!planned.place.is_host() && options.implementation == "auto" && is_all_plain(plan)) {
    const auto& passed_over = planned.selection.passed_over;
    const auto flash =
        std::ranges::find(passed_over, "flash_attn2", &std::pair<std::string, std::string>::first);
    warnings.push_back(
        "on GPUs, only the plain kernel (native) takes this problem, and it is many times slower "
        "than the others; " +
        (flash == passed_over.end() ? "--impl flash_attn2 says why that one does not"
                                    : "flash_attn2: " + flash->second));
  }
  return warnings;
}

}  // namespace annulus::launcher
