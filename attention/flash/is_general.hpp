#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::flash {

/// True if the problem needs a kernel of the general class: see MaskClass.
[[nodiscard]] inline bool is_general(const AttentionProblem& problem) {
  return problem.bias || problem.dense_mask ||
         (problem.dropout && problem.dropout->threshold() > 0);
}

}  // namespace annulus::flash
