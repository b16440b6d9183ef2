#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// The ranks of the mesh that `input` is planned for, in ascending order.
[[nodiscard]] inline std::vector<int> all_ranks(const PlanInput& input) {
  std::vector<int> ranks(static_cast<std::size_t>(input.operands.key.mesh().ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace annulus::ring
