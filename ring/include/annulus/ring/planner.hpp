#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// Throws ArgumentError for an unknown name, NotAvailableError for a schedule of SEMANTICS §5 that
/// this version lacks.
[[nodiscard]] Schedule parse_schedule(std::string_view name);

struct PlanOptions {
  /// "auto", or a name of SEMANTICS §5.
  std::string schedule = "auto";
  /// Allgather gathers by groups of key/value heads so that one group's buffer stays below this.
  std::int64_t gather_bytes = std::int64_t{256} << 20;
};

/// Why `auto` chose as it did.
struct ScheduleChoice {
  Schedule schedule = Schedule::local;
  std::vector<std::pair<Schedule, std::string>> passed_over;
};

/// Resolves options.schedule. Throws UnsupportedError when a named schedule cannot run: local, with
/// a sharded key/value sequence.
[[nodiscard]] ScheduleChoice choose_schedule(const AttentionProblem& problem,
                                             const ShardedOperands& operands,
                                             const PlanOptions& options, const CostModel& model);

/// The plan of one rank; what that rank's executor needs.
[[nodiscard]] RankPlan make_rank_plan(const AttentionProblem& problem,
                                      const ShardedOperands& operands, Schedule schedule,
                                      const PlanOptions& options, int rank);

/// The plans of all ranks.
[[nodiscard]] Plan make_plan(const AttentionProblem& problem, const ShardedOperands& operands,
                             Schedule schedule, const PlanOptions& options);

}  // namespace annulus::ring
