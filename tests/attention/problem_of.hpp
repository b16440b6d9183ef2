#pragma once

#include <string>

#include <annulus/attention/problem.hpp>

namespace annulus::test {

inline AttentionProblem problem_of(const AttentionShape& shape, DType dtype = DType::float32) {
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  return problem;
}

inline AttentionProblem causal_problem_of(const AttentionShape& shape, DType dtype = DType::float32,
                                          std::int64_t offset = 0) {
  AttentionProblem problem = problem_of(shape, dtype);
  problem.mask.set_causal(true);
  problem.mask.set_offset(offset);
  return problem;
}

/// Problems of a half type.
inline AttentionProblem half_problem(const AttentionShape& shape, DType dtype = DType::bfloat16) {
  return problem_of(shape, dtype);
}

inline AttentionProblem causal_half_problem(const AttentionShape& shape, std::int64_t offset = 0) {
  return causal_problem_of(shape, DType::bfloat16, offset);
}

inline std::string describe(const AttentionProblem& problem) {
  return to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
         to_string(problem.mask) + (problem.dropout ? " dropout" : "") +
         (problem.scale ? " scale " + std::to_string(*problem.scale) : "") +
         (problem.soft_cap ? " soft cap " + std::to_string(*problem.soft_cap) : "") +
         (problem.bias ? " bias" : "") + (problem.dense_mask ? " dense mask" : "");
}

}  // namespace annulus::test
