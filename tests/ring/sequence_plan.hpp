#pragma once

#include <cstdint>

#include <annulus/ring/planner.hpp>

/// Self-attention whose sequences are sharded over all ranks.
namespace annulus::ring {

inline AttentionProblem causal_problem(std::int64_t length, std::int64_t heads = 8,
                                       std::int64_t kv_heads = 2) {
  AttentionProblem problem;
  problem.shape = {1, length, length, heads, kv_heads, 64, 64};
  problem.dtype = DType::bfloat16;
  problem.mask.set_causal(true);
  return problem;
}

inline ShardedOperands sequence_operands(const AttentionProblem& problem, int ranks,
                                         LayoutKind layout) {
  return shard_operands(problem, MeshShape({{"sp", ranks}}),
                        {PartitionSpec::parse("-,sp"), PartitionSpec::parse("-,sp"), layout, 1});
}

inline Plan sequence_plan(const AttentionProblem& problem, int ranks, LayoutKind layout,
                          Schedule schedule, const PlanOptions& options = {}) {
  return make_plan(problem, sequence_operands(problem, ranks, layout), schedule, options);
}

}  // namespace annulus::ring
