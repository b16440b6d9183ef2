#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::test {

inline AttentionProblem problem_of(const AttentionShape& shape, DType dtype = DType::float32) {
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  return problem;
}

inline AttentionProblem causal_problem_of(const AttentionShape& shape,
                                          DType dtype = DType::float32) {
  AttentionProblem problem = problem_of(shape, dtype);
  problem.mask.set_causal(true);
  return problem;
}

/// A problem of a half type.
inline AttentionProblem half_problem(const AttentionShape& shape, DType dtype = DType::bfloat16) {
  return problem_of(shape, dtype);
}

}  // namespace annulus::test
