#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::flash {

/// True if the problem has a bias, a dense mask or dropout, for which kernels look at every pair.
[[nodiscard]] inline bool has_modifiers(const AttentionProblem& problem) {
  return problem.bias || problem.dense_mask ||
         (problem.dropout && problem.dropout->threshold() > 0);
}

}  // namespace annulus::flash
