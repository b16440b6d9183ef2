#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::test {

inline AttentionProblem problem_of(const AttentionShape& shape, DType dtype = DType::float32) {
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  return problem;
}

}  // namespace annulus::test
