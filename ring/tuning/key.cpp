#include "tuning/key.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/features.hpp>
#include <annulus/attention/modifiers.hpp>
#include <annulus/attention/problem_class.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/ring/machine.hpp>

namespace annulus::ring {
namespace {

// The parts that hide pairs by position: "band+segments". A bias, a dense mask and dropout are
// modifiers.
std::string mask_kind(const AttentionProblem& problem) {
  const FeatureSet asked = features_of(problem);
  std::vector<std::string_view> kinds;
  const auto add = [&](MaskKind kind, const FeatureSet& features) {
    if (asked.intersects(features)) kinds.push_back(annulus::name_of(kind));
  };
  add(MaskKind::band, FeatureSet::positions());
  add(MaskKind::segments, {Feature::segments, Feature::lengths});
  add(MaskKind::blocks, {Feature::block_mask});
  if (kinds.empty()) kinds.push_back(annulus::name_of(MaskKind::none));
  return fmt::format("{}", fmt::join(kinds, "+"));
}

// "band, 1/2 visible".
std::string mask_text(const AttentionProblem& problem) {
  const AttentionShape& shape = problem.shape;
  const std::string kind = mask_kind(problem);
  const double all = static_cast<double>(shape.batch) * static_cast<double>(shape.query_length) *
                     static_cast<double>(shape.kv_length);
  const auto pairs =
      static_cast<double>(problem.mask
                              .examine(0, shape.batch, {GlobalPosition(0), shape.query_length, 1},
                                       {GlobalPosition(0), shape.kv_length, 1})
                              .pairs);
  if (pairs == 0) return kind + ", nothing visible";
  const auto power = static_cast<unsigned>(std::lround(std::log2(std::max(1.0, all / pairs))));
  return power == 0 ? kind + ", visible" : fmt::format("{}, 1/{} visible", kind, 1ULL << power);
}

std::string modifiers(const AttentionProblem& problem) {
  std::vector<std::string> kinds;
  for (const Modifier& one : modifiers_of(problem)) {
    if (!one.kind.empty()) kinds.push_back(one.kind);
  }
  return kinds.empty() ? "none" : fmt::format("{}", fmt::join(kinds, ", "));
}

// "-,sp(zigzag),-,-", as to_string(), except that balanced layouts of all masks have one text.
std::string layout(const NamedSharding& sharding) {
  std::string entries;
  for (int dim = 0; dim < sharding.dimensions(); ++dim) {
    entries += (dim == 0 ? "" : ",") + to_string(sharding.spec()[dim]);
    const Distribution& distribution = sharding.distribution(dim);
    if (sharding.spec()[dim].empty() || distribution == Distribution::block()) continue;
    entries += distribution.assignment() != nullptr ? "(balanced)"
                                                    : fmt::format("({})", to_string(distribution));
  }
  return entries;
}

std::string candidates_text(const PlanInput& input) {
  std::vector<std::string> names;
  for (const Implementation* candidate : input.candidates) {
    names.push_back(candidate->names().front());
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// The caller's decisions about plans: see PlanOptions.
std::string named_text(const ShardedAttentionOptions& options, const PlanInput& input,
                       const std::string& schedule, const OpenChoices& open) {
  const PlanOptions& plan = input.options;
  std::vector<std::string> parts;
  if (!open.schedule) parts.push_back("schedule " + schedule);
  if (!open.transport) {
    parts.push_back(fmt::format("transport {}", annulus::name_of(options.transport)));
  }
  if (!plan.preferred.empty()) parts.push_back(plan.preferred + " preferred");
  if (!open.ulysses_degree) parts.push_back(fmt::format("ulysses degree {}", plan.ulysses_degree));
  if (!open.inner_size) parts.push_back(fmt::format("inner size {}", plan.inner_size));
  if (!open.head_groups) {
    parts.push_back(fmt::format("head groups of {} bytes", plan.head_group_bytes));
  }
  parts.push_back(fmt::format("gathers of {} bytes", plan.gather_bytes));
  parts.push_back(fmt::format("results of {} bytes", plan.result_bytes));
  parts.push_back(fmt::format("prefetches of {} bytes", plan.prefetch_bytes));
  parts.emplace_back(plan.direct ? "direct" : "from neighbours");
  parts.push_back(fmt::format("LSE {}", annulus::name_of(plan.lse_dtype)));
  if (!plan.await_columns) parts.emplace_back("awaiting none");
  if (!options.runner.replay) parts.emplace_back("not replayed");
  return fmt::format("{}", fmt::join(parts, ", "));
}

// The limits of what was measured.
std::string limits_text(const TuningOptions& tuning) {
  return fmt::format("{} candidates of {} runs, predicted within {} times the best, in {} s",
                     tuning.candidates, tuning.runs, tuning.factor, tuning.seconds);
}

// Neighbours on one node count together: "0 x 8, 1 x 8".
std::string placement_text(const std::vector<int>& node_of_rank) {
  std::vector<std::string> runs;
  for (std::size_t begin = 0, end = 0; begin < node_of_rank.size(); begin = end) {
    while (end < node_of_rank.size() && node_of_rank[end] == node_of_rank[begin]) ++end;
    runs.push_back(fmt::format("{} x {}", node_of_rank[begin], end - begin));
  }
  return fmt::format("{}", fmt::join(runs, ", "));
}

}  // namespace

Machine machine_of(Mesh& mesh, Place place, int threads) {
  Control& control = mesh.world();
  Machine machine;
  const std::set<std::string> distinct = control.distinct_texts(
      collectively(control, [&] { return device_name(place); }), "names of devices");
  machine.devices.assign(distinct.begin(), distinct.end());
  const std::vector<int>& nodes = mesh.topology().node_of_rank;
  const std::vector<int> machines = Topology::of_machines(control).node_of_rank;
  machine.nodes = placement_text(nodes);
  if (machines != nodes) machine.nodes += " of machines " + placement_text(machines);
  machine.versions = fmt::format("annulus {}, {}", library_version(), library_versions(place));
  machine.shares_gpus = !place.is_host() && mesh.ranks_on_one_gpu(place).has_value();
  machine.threads = threads;
  return machine;
}

TuningKey make_tuning_key(const PlanInput& input, const ShardedAttentionOptions& options,
                          const std::string& schedule, const OpenChoices& open,
                          const Machine& machine) {
  const AttentionProblem& problem = input.problem;
  const ShardedOperands& operands = input.operands;
  std::string device = fmt::format("{}", fmt::join(machine.devices, " and "));
  if (machine.shares_gpus) device += ", shared";
  TuningKey key{
      {"device", std::move(device)},
      {"versions", options.tuning.build.empty()
                       ? machine.versions
                       : fmt::format("{}, built from {}", machine.versions, options.tuning.build)},
      {"shape", to_string(problem.shape)},
      {"local shapes", fmt::format("query {}, key {}", to_string(operands.query.local_shape(0)),
                                   to_string(operands.key.local_shape(0)))},
      {"dtype", std::string(annulus::name_of(problem.dtype))},
      {"mask", mask_text(problem)},
      {"modifiers", modifiers(problem)},
      {"mesh", to_string(operands.key.mesh())},
      {"ranks", std::to_string(operands.key.mesh().ranks())},
      {"nodes of ranks", machine.nodes},
      {"layout", fmt::format("query {}, key {}", layout(operands.query), layout(operands.key))},
      {"implementations", candidates_text(input)},
      {"named", named_text(options, input, schedule, open)},
      {"limits", limits_text(options.tuning)},
      {"cost model", input.prices.model.source}};
  if (input.prices.model.device == Place::Kind::host) {
    key["threads"] = std::to_string(machine.threads);
  }
  return key;
}

}  // namespace annulus::ring
