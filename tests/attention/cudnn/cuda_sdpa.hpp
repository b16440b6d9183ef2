#pragma once

#include <vector>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {

inline const Implementation& sdpa() {
  static const Registry registry = Registry::standard();
  return registry.get("sdpa");
}

/// Queries near 1 and keys near −4: logits are about −4 D · scale.
inline void make_strongly_negative(WholeAttention& whole) {
  const auto shift = [&](Tensor& tensor, float by) {
    std::vector<float> values(static_cast<std::size_t>(tensor.shape().product()));
    to_float32(tensor.view().data(), tensor.dtype(), values.data(), tensor.shape().product());
    for (float& value : values) value = by + 0.1F * value;
    tensor = tensor_of(tensor.dtype(), tensor.shape(), values);
  };
  shift(whole.query, 1.0F);
  shift(whole.key, -4.0F);
}

/// A problem of one head under a mask, and the block of all its rows and columns.
struct MaskedBlock {
  MaskedBlock(const Mask& mask, std::int64_t batch, std::int64_t rows, std::int64_t columns)
      : problem(half_problem({batch, rows, columns, 1, 1, 8, 8})),
        block{PositionRanges::all(rows), PositionRanges::all(columns), 0, batch, false} {
    problem.mask = mask;
  }
  AttentionProblem problem;
  BlockGeometry block;
};

}  // namespace annulus::test
