#pragma once

#include <span>
#include <string>
#include <vector>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>

#include "schedules/building/group_nodes.hpp"
#include "schedules/building/kv_needs.hpp"

namespace annulus::ring {

/// The rank, of one key/value group, that a schedule plans for.
struct RankContext {
  const PlanInput& input;
  const std::vector<int>& group;  ///< the mesh ranks of the group, by group rank
  const KvNeeds& needs;           ///< of the ranks of the group
  const GroupNodes& nodes;        ///< likewise
  int rank = 0;                   ///< in the mesh
  int group_rank = 0;             ///< in the group
};

/// One schedule, one function, one file, one line of the table. Each starts from PlanBuilder.
[[nodiscard]] RankPlan plan_local(const RankContext& context);
[[nodiscard]] RankPlan plan_ring(const RankContext& context);
[[nodiscard]] RankPlan plan_double_ring(const RankContext& context);
[[nodiscard]] RankPlan plan_allgather(const RankContext& context);
[[nodiscard]] RankPlan plan_ulysses(const RankContext& context);
[[nodiscard]] RankPlan plan_hybrid(const RankContext& context);
[[nodiscard]] RankPlan plan_pass_q(const RankContext& context);

/// The same for the backward pass. Other schedules than local are for groups of several ranks, each
/// with rows of its own.
[[nodiscard]] RankPlan plan_local_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_ring_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_double_ring_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_hybrid_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_allgather_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_ulysses_backward(const RankContext& context);
[[nodiscard]] RankPlan plan_pass_q_backward(const RankContext& context);

/// True if all ranks of a key/value group have the same rows; otherwise each has its own.
[[nodiscard]] bool has_replicated_rows(const PlanInput& input);
/// The number of neighbouring ranks that exchange heads in the schedule hybrid. See
/// PlanOptions::ulysses_degree.
[[nodiscard]] int ulysses_degree(const PlanInput& input);
/// The number of neighbouring ranks that form a row in the schedule double_ring.
[[nodiscard]] int inner_size(const PlanInput& input);

struct ScheduleEntry {
  Schedule schedule;
  RankPlan (*plan)(const RankContext& context);
  RankPlan (*backward)(const RankContext& context);
  /// Why it cannot run forward, or is not worth considering; empty if neither.
  std::string (*obstacle)(const PlanInput& input);
  std::string (*pointless)(const PlanInput& input);
  /// The ways to split the ranks along the sequence, at least one; see variants_for().
  std::vector<ScheduleVariant> (*variants)(const PlanInput& input);
};

/// Every schedule. If several tie in time and memory, `auto` takes the first.
[[nodiscard]] std::span<const ScheduleEntry> schedule_table();
[[nodiscard]] const ScheduleEntry& entry_of(Schedule schedule);
/// Why a schedule cannot run, forward or backward as the input says; empty if it can.
[[nodiscard]] std::string obstacle_of(const ScheduleEntry& entry, const PlanInput& input);
/// As obstacle_of(), for a schedule that somebody has named. It must have an axis to work along:
/// one of a single rank will do, so that a job that names the ring can shrink to one rank.
[[nodiscard]] std::string named_obstacle_of(const ScheduleEntry& entry, const PlanInput& input);

}  // namespace annulus::ring
