#include "recommend/planned_problem.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include <annulus/core/error.hpp>

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

VariantSearch::VariantSearch(const PlanInput& input, const std::string& schedule)
    : input_(input), predictor_(input) {
  for (const ConsideredVariant& one : variants_for(input, schedule)) {
    if (!one.is_open()) continue;
    try {
      variants_.emplace_back(predictor_.least(with_variant(input, one.variant), one.variant),
                             one.variant);
    } catch (const UserError&) {
      continue;  // kernels refuse it
    }
  }
  sort(variants_);
}

double VariantSearch::least() const {
  return variants_.empty() ? std::numeric_limits<double>::infinity()
                           : variants_.front().first.seconds;
}

std::optional<std::pair<ScheduleVariant, PredictedRun>> VariantSearch::fastest(double limit) {
  Variants hopeful;
  double at_most = limit;
  for (const auto& [least, variant] : variants_) {
    if (least.seconds > limit) break;
    try {
      hopeful.emplace_back(
          predictor_.estimate(with_variant(input_, variant), variant, least, at_most), variant);
      at_most = std::min(at_most, hopeful.back().first.seconds * kSampleError);
    } catch (const UnsupportedError&) {
      continue;  // kernels refuse blocks of a rank with less work
    }
  }
  sort(hopeful);
  std::optional<std::pair<ScheduleVariant, PredictedRun>> fastest;
  for (const auto& [estimate, variant] : hopeful) {
    if (fastest && estimate.seconds > limit * kSampleError) break;
    try {
      const std::optional<PredictedRun> run =
          predictor_.run(with_variant(input_, variant), variant, limit);
      if (!run || run->seconds >= limit) continue;
      limit = run->seconds;
      fastest.emplace(variant, *run);
    } catch (const UnsupportedError&) {
      continue;
    }
  }
  return fastest;
}

void VariantSearch::sort(Variants& variants) {
  std::stable_sort(variants.begin(), variants.end(),
                   [](const auto& a, const auto& b) { return a.first.seconds < b.first.seconds; });
}

}  // namespace annulus::ring
