#include "recommend/planned_problem.hpp"

#include <utility>

#include <annulus/ring/predicted_run.hpp>

#include "face/sharded_options.hpp"
#include "tuning/parameters.hpp"

namespace annulus::ring {

PlannedProblem::PlannedProblem(const AttentionOptions& options, const Registry& registry,
                               Place place, Presence presence, std::vector<int> node_of_rank)
    : options_(options), place_(place), node_of_rank_(std::move(node_of_rank)) {
  static_cast<AttentionProblem&>(options_) = problem_of(options);
  const auto named = [](const std::string& name) { return name.empty() ? "auto" : name; };
  const std::string schedule = named(options.schedule);
  if (schedule != "auto") static_cast<void>(parse_schedule(schedule));
  const Selection selection =
      registry.select(named(options.implementation), options_, place, presence);
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
  PlanInput made = make_plan_input(
      options_, laid_out.operands, implementations_, place_, laid_out.model,
      with_parameters(options_.plan.value_or(PlanOptions::for_place(place_)), options_));
  made.prices.node_of_rank = node_of_rank_;
  return made;
}

}  // namespace annulus::ring
