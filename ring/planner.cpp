#include <array>
#include <map>
#include <memory>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/merge_plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

#include "kv_needs.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

// Axes along which key/value is sharded. An axis of one rank shards nothing.
AxisNames sequence_axes(const ShardedOperands& operands) {
  return operands.key.spec()[1];
}

bool is_sharded(const ShardedOperands& operands) {
  return operands.key.shards(1) > 1;
}

// The one line per schedule.
RankPlan plan_rank(Schedule schedule, const RankContext& context, const PlanOptions& options) {
  switch (schedule) {
    case Schedule::local:
      return plan_local(context);
    case Schedule::ring:
      return plan_ring(context, options);
    case Schedule::allgather:
      return plan_allgather(context, options);
  }
  throw InternalError("schedule without a planner");
}

RankPlan plan_rank(const AttentionProblem& problem, const ShardedOperands& operands,
                   Schedule schedule, const PlanOptions& options, const KvNeeds& needs, int rank) {
  const RankContext context{
      problem, operands, needs, rank, operands.key.coordinate(rank, 1), options.straight_blocks};
  return plan_rank(schedule, context, options);
}

std::vector<int> kv_group(const ShardedOperands& operands, int rank) {
  return operands.key.mesh().group(rank, sequence_axes(operands));
}

}  // namespace

PlanOptions PlanOptions::for_place(Place place) {
  PlanOptions options;
  if (place.is_host()) return options;
  options.merge_bytes = kMergeBytes;
  options.prefetch_bytes = std::int64_t{1} << 30;
  options.direct = true;
  options.straight_blocks = true;
  return options;
}

Schedule parse_schedule(std::string_view name) {
  for (const Schedule schedule : {Schedule::local, Schedule::ring, Schedule::allgather}) {
    if (name == name_of(schedule)) return schedule;
  }
  for (const std::string_view later : {"ulysses", "hybrid", "double_ring", "pass_q"}) {
    if (name == later) throw NotAvailableError(fmt::format("schedule {}", later));
  }
  throw ArgumentError(
      "schedule", fmt::format("'{}'", name),
      "auto, local, ring or allgather (later: ulysses, hybrid, double_ring, pass_q)");
}

ScheduleChoice choose_schedule(const AttentionProblem& problem, const ShardedOperands& operands,
                               std::string_view name, const PlanOptions& options,
                               const CostModel& model) {
  const bool sharded = is_sharded(operands);
  const std::string whole = "the key/value sequence is not sharded: nothing has to travel";
  const std::string cut =
      fmt::format("the key/value sequence is sharded along {}", to_string(sequence_axes(operands)));
  ScheduleChoice choice;
  if (name != "auto") {
    choice.schedule = parse_schedule(name);
    if (choice.schedule == Schedule::local && sharded) {
      throw UnsupportedError("schedule local cannot run: " + cut);
    }
    return choice;
  }
  if (!sharded) {
    choice.schedule = Schedule::local;
    choice.passed_over = {{Schedule::ring, whole}, {Schedule::allgather, whole}};
    return choice;
  }
  choice.passed_over.emplace_back(Schedule::local, cut);
  const double ring =
      predicted_seconds(make_plan(problem, operands, Schedule::ring, options), model);
  const double allgather =
      predicted_seconds(make_plan(problem, operands, Schedule::allgather, options), model);
  // The ring needs less memory: allgather must be faster by more than the prediction's noise.
  constexpr double kNoise = 1.01;
  const bool take_ring = ring <= allgather * kNoise;
  choice.schedule = take_ring ? Schedule::ring : Schedule::allgather;
  const bool tie = take_ring && allgather <= ring * kNoise;
  choice.passed_over.emplace_back(
      take_ring ? Schedule::allgather : Schedule::ring,
      fmt::format("predicted {:.3g} ms against {:.3g} ms{} ({})",
                  (take_ring ? allgather : ring) * 1e3, (take_ring ? ring : allgather) * 1e3,
                  tie ? ", a tie, in which the ring needs less memory" : "", model.source));
  return choice;
}

RankPlan make_rank_plan(const AttentionProblem& problem, const ShardedOperands& operands,
                        Schedule schedule, const PlanOptions& options, int rank) {
  const KvNeeds needs(problem, operands, kv_group(operands, rank));
  return plan_rank(problem, operands, schedule, options, needs, rank);
}

Plan make_plan(const AttentionProblem& problem, const ShardedOperands& operands, Schedule schedule,
               const PlanOptions& options) {
  const MeshShape& mesh = operands.key.mesh();
  Plan plan{problem,
            mesh,
            sequence_axes(operands),
            schedule,
            std::string(name_of(operands.key.distribution(1).layout())),
            {}};
  // The ranks of a group ask about the same needs.
  std::map<std::vector<int>, std::unique_ptr<KvNeeds>> needs;
  plan.ranks.reserve(static_cast<std::size_t>(mesh.ranks()));
  for (int rank = 0; rank < mesh.ranks(); ++rank) {
    const std::vector<int> group = kv_group(operands, rank);
    std::unique_ptr<KvNeeds>& of_group = needs[group];
    if (!of_group) of_group = std::make_unique<KvNeeds>(problem, operands, group);
    plan.ranks.push_back(plan_rank(problem, operands, schedule, options, *of_group, rank));
  }
  return plan;
}

}  // namespace annulus::ring
