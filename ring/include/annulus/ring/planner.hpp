#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/core/place.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// Throws ArgumentError for an unknown name, NotAvailableError for a schedule of SEMANTICS §5 that
/// this version lacks.
[[nodiscard]] Schedule parse_schedule(std::string_view name);

/// How a schedule is carried out. What is best depends on the place: see for_place().
struct PlanOptions {
  /// Allgather gathers by groups of key/value heads so that one group's buffer stays below this.
  std::int64_t gather_bytes = std::int64_t{256} << 20;
  /// The ring goes round for one group of key/value heads after the other, so that the partial
  /// results of a group take no more than this, or than the output would in float32 where that is
  /// more. 0: all heads at once.
  std::int64_t merge_bytes = 0;
  /// In the ring, columns come straight from their owners instead of from neighbour to neighbour:
  /// the same bytes, none of which pass through other ranks, where all are linked alike.
  bool direct = false;
  /// Each hop of the ring has a receive buffer of its own while they all fit in this: transfers
  /// then run ahead of the computation. Else two take turns.
  std::int64_t prefetch_bytes = 0;
  /// Blocks are cut, by rows and by documents, until each has a mask that is one straight band with
  /// a length per batch (see LocalMask): for kernels that know no other.
  bool straight_blocks = false;

  /// What suits the kernels and the memory of a place.
  static PlanOptions for_place(Place place);
};

/// Why `auto` chose as it did.
struct ScheduleChoice {
  Schedule schedule = Schedule::local;
  std::vector<std::pair<Schedule, std::string>> passed_over;
};

/// `name` is "auto" or one of SEMANTICS §5. Throws the errors of parse_schedule(), and
/// UnsupportedError when a named schedule cannot run: local, with a sharded key/value sequence.
[[nodiscard]] ScheduleChoice choose_schedule(const AttentionProblem& problem,
                                             const ShardedOperands& operands, std::string_view name,
                                             const PlanOptions& options, const CostModel& model);

/// The plan of one rank; what that rank's executor needs.
[[nodiscard]] RankPlan make_rank_plan(const AttentionProblem& problem,
                                      const ShardedOperands& operands, Schedule schedule,
                                      const PlanOptions& options, int rank);

/// The plans of all ranks.
[[nodiscard]] Plan make_plan(const AttentionProblem& problem, const ShardedOperands& operands,
                             Schedule schedule, const PlanOptions& options);

}  // namespace annulus::ring
