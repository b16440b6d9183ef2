#pragma once

#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "kv_needs.hpp"

namespace annulus::ring {

/// What a schedule plans with: one rank of one key/value group.
struct RankContext {
  const AttentionProblem& problem;
  const ShardedOperands& operands;
  const KvNeeds& needs;
  int rank = 0;                  ///< in the mesh
  int group_rank = 0;            ///< in the group
  bool straight_blocks = false;  ///< see PlanOptions
};

/// One schedule, one function, one file. Each starts from StepBuilder (step_builder.hpp).
[[nodiscard]] RankPlan plan_local(const RankContext& context);
[[nodiscard]] RankPlan plan_ring(const RankContext& context, const PlanOptions& options);
[[nodiscard]] RankPlan plan_allgather(const RankContext& context, const PlanOptions& options);

}  // namespace annulus::ring
