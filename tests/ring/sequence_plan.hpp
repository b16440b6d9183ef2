#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>

#include <annulus/ring/planner.hpp>

#include "tests/attention/wrapped_native.hpp"

/// Self-attention whose sequences are sharded over all ranks, and what plans of it are made from.
namespace annulus::ring {

/// All but local, which has one rank.
inline constexpr std::array kSchedules{Schedule::ring,      Schedule::double_ring,
                                       Schedule::allgather, Schedule::ulysses,
                                       Schedule::hybrid,    Schedule::pass_q};

inline AttentionProblem causal_problem(std::int64_t length, std::int64_t heads = 8,
                                       std::int64_t kv_heads = 2, std::int64_t dim = 64) {
  AttentionProblem problem;
  problem.shape = {1, length, length, heads, kv_heads, dim, dim};
  problem.dtype = DType::bfloat16;
  problem.mask.set_causal(true);
  return problem;
}

inline AttentionProblem unmasked_problem(std::int64_t length, std::int64_t heads = 8,
                                         std::int64_t kv_heads = 2, std::int64_t dim = 64) {
  AttentionProblem problem = causal_problem(length, heads, kv_heads, dim);
  problem.mask = {};
  return problem;
}

/// Operands with these specs.
inline ShardedOperands sharded_by(const AttentionProblem& problem, const MeshShape& mesh,
                                  const std::string& query, const std::string& kv,
                                  LayoutKind layout = LayoutKind::contiguous) {
  return shard_operands(problem, mesh,
                        {PartitionSpec::parse(query), PartitionSpec::parse(kv), layout});
}

/// The operands live as long as the program, so that inputs of plans may refer to them.
inline const ShardedOperands& sequence_operands(const AttentionProblem& problem, int ranks,
                                                LayoutKind layout) {
  static std::deque<ShardedOperands> all;
  return all.emplace_back(sharded_by(problem, MeshShape({{"sp", ranks}}), "-,sp", "-,sp", layout));
}

/// Calls body(input, variant) for every variant that is worth planning. `input` has its options.
template <class Body>
void each_variant(const PlanInput& input, const Body& body) {
  for (const ConsideredVariant& one : variants_for(input, "auto")) {
    if (one.is_open()) body(with_variant(input, one.variant), one.variant);
  }
}

/// Whatever was assumed or measured.
inline void set_rate(Prices& prices, const std::string& implementation, double rate) {
  prices.kernels.at(implementation).rate = CostCurve::constant(rate);
}

/// The native kernel alone; it only has to take everything.
inline PlanInput native_input(const AttentionProblem& problem, const ShardedOperands& operands,
                              const PlanOptions& options = {},
                              const CostModel& model = CostModel::cpu_core()) {
  static const Registry registry = Registry::standard();
  return make_plan_input(problem, operands, {&registry.get("native")}, Place::host(), model,
                         options);
}

/// cuDNN in front of the native kernel, on GPUs that need not exist.
inline PlanInput gpu_input(const AttentionProblem& problem, const ShardedOperands& operands,
                           const PlanOptions& options = PlanOptions::for_place(Place::cuda(0)),
                           const CostModel& model = CostModel::hopper_nvlink()) {
  static const Registry registry = Registry::standard();
  return make_plan_input(problem, operands, {&registry.get("sdpa"), &registry.get("native")},
                         Place::cuda(0), model, options);
}

/// Likewise with our own flash kernel alone, under either name, which continues softmax states.
inline PlanInput flash_input(const AttentionProblem& problem, const ShardedOperands& operands,
                             const PlanOptions& options = PlanOptions::for_place(Place::cuda(0))) {
  static const Registry registry = Registry::standard();
  const char* const name = problem.mask.block_mask() ? "blocksparse" : "flash_attn2";
  return make_plan_input(problem, operands, {&registry.get(name)}, Place::cuda(0),
                         CostModel::hopper_nvlink(), options);
}

inline Plan sequence_plan(const AttentionProblem& problem, int ranks, LayoutKind layout,
                          Schedule schedule, const PlanOptions& options = {}) {
  const ShardedOperands operands = sequence_operands(problem, ranks, layout);
  return make_plan(native_input(problem, operands, options), schedule);
}

}  // namespace annulus::ring
