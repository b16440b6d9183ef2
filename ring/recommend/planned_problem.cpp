#include "recommend/planned_problem.hpp"

#include <algorithm>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "face/sharded_options.hpp"
#include "tuning/parameters.hpp"

namespace annulus::ring {

PlannedProblem::PlannedProblem(const AttentionOptions& options, const Registry& registry,
                               Place place, Presence presence, std::vector<int> node_of_rank,
                               std::optional<BackwardRequest> backward)
    : options_(options),
      place_(place),
      node_of_rank_(std::move(node_of_rank)),
      backward_(std::move(backward)) {
  static_cast<AttentionProblem&>(options_) = problem_of(options);
  const auto named = [&](const std::string& name, const std::string& of_backward) {
    if (backward_ && !of_backward.empty()) return of_backward;
    return name.empty() ? "auto" : name;
  };
  const std::string schedule = named(options.schedule, options.backward.schedule);
  if (schedule != "auto") static_cast<void>(parse_schedule(schedule));
  const Selection selection =
      registry.select(named(options.implementation, options.backward.implementation), options_,
                      place, presence, backward_ ? Pass::backward : Pass::forward);
  implementations_ = selection.candidates;
  schedule_ = selection.schedule_for(schedule);
}

LaidOut PlannedProblem::lay_out(const MeshShape& mesh, const LayoutOptions& asked) const {
  LaidOut made{shard_operands(options_, mesh, default_layout(options_, mesh, asked)),
               options_.cost_model ? *options_.cost_model : CostModel::for_place(place_)};
  settle_transport(made.model, options_.transport, made.operands.key, node_of_rank_);
  return made;
}

PlanInput PlannedProblem::input(const LaidOut& laid_out) const {
  PlanOptions plan =
      with_parameters(options_.plan.value_or(PlanOptions::for_place(place_)), options_);
  if (backward_) plan.grad_wire = options_.backward.grad_wire;
  PlanInput made = make_plan_input(options_, laid_out.operands, implementations_, place_,
                                   laid_out.model, plan, backward_);
  made.prices.node_of_rank = node_of_rank_;
  return made;
}

std::optional<std::pair<ScheduleVariant, PredictedRun>> fastest_run(const PlanInput& input,
                                                                    const std::string& schedule,
                                                                    double limit) {
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
  std::optional<std::pair<ScheduleVariant, PredictedRun>> fastest;
  for (const auto& [least, variant] : variants) {
    if (least > limit) break;
    try {
      const std::optional<PredictedRun> run = predictor.run(with(variant), variant, limit);
      if (!run || run->seconds >= limit) continue;
      limit = run->seconds;
      fastest.emplace(variant, *run);
    } catch (const UnsupportedError&) {
      continue;  // kernels refuse blocks of a rank with less work
    }
  }
  return fastest;
}

}  // namespace annulus::ring
