#pragma once

#include <span>
#include <string>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>

#include "kv_needs.hpp"

namespace annulus::ring {

/// What a schedule plans for: one rank of one key/value group.
struct RankContext {
  const PlanInput& input;
  const KvNeeds& needs;
  int rank = 0;        ///< in the mesh
  int group_rank = 0;  ///< in the group
};

/// One schedule, one function, one file, one line of the table. Each starts from PlanBuilder.
[[nodiscard]] RankPlan plan_local(const RankContext& context);
[[nodiscard]] RankPlan plan_ring(const RankContext& context);
[[nodiscard]] RankPlan plan_allgather(const RankContext& context);

struct ScheduleEntry {
  Schedule schedule;
  RankPlan (*plan)(const RankContext& context);
  /// Why it cannot run, or is not worth considering; empty if neither.
  std::string (*obstacle)(const PlanInput& input);
  std::string (*pointless)(const PlanInput& input);
};

/// Every schedule, the one that needs least memory first. `auto` breaks ties in this order.
[[nodiscard]] std::span<const ScheduleEntry> schedule_table();
[[nodiscard]] const ScheduleEntry& entry_of(Schedule schedule);

}  // namespace annulus::ring
