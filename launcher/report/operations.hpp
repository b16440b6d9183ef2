#pragma once

#include <annulus/attention/problem.hpp>

namespace annulus::launcher {

/// Operations of a backward pass over this many visible pairs of rows and columns, counted once for
/// all heads: five matrix products instead of two (FlashAttention-2, Dao 2023, §4.1).
[[nodiscard]] inline double backward_flops(const AttentionShape& shape, double visible_pairs) {
  return 2.0 * visible_pairs * static_cast<double>(shape.heads) *
         static_cast<double>(3 * shape.head_dim + 2 * shape.value_dim);
}

}  // namespace annulus::launcher
