#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// Bias and dense mask of a call, as views [b,n,t,S]: batches, query heads and rows are those of
/// the call, keys are all those of the problem. Keys are indexed by global position, so the columns
/// of a block may be in any order. Broadcast dimensions have stride 0; unless it is broadcast, the
/// last dimension has stride 1.
///
/// A pair is hidden where the mask is 0 or the bias is −∞. A mask given as a bias of 0 and −∞
/// therefore means the same as a dense mask, also for rows that see no key. Bias entries of hidden
/// pairs affect nothing.
struct ScoreTensors {
  std::optional<ConstTensorView> bias = {};  ///< float32
  std::optional<ConstTensorView> mask = {};  ///< boolean: a pair is visible where it is not 0

  [[nodiscard]] bool empty() const noexcept { return !bias && !mask; }
  /// Whether both leave a pair visible. All indices but the column are local. Host tensors only.
  [[nodiscard]] bool shows(std::int64_t batch, std::int64_t head, std::int64_t row,
                           GlobalPosition column) const {
    if (mask && mask->at<std::uint8_t>({batch, head, row, column.value()}) == 0) return false;
    return !bias || bias->at<float>({batch, head, row, column.value()}) !=
                        -std::numeric_limits<float>::infinity();
  }
  /// The views of `count` batches, heads or rows, from `begin` on.
  [[nodiscard]] ScoreTensors slice(int dim, std::int64_t begin, std::int64_t count) const;
  /// Throws InternalError unless there are views of just what `problem` has, of this shape.
  void check(const AttentionProblem& problem, const Extents& shape) const;
};

/// A view of `tensor` in the shape `shape`; each dimension of `tensor` is 1, and then gets stride
/// 0, or that of `shape`.
[[nodiscard]] ConstTensorView broadcast_to(const ConstTensorView& tensor, const Extents& shape);

/// Views [b,n,t,S] of a rank's parts; a tensor without dimensions stands for none.
[[nodiscard]] ScoreTensors broadcast_scores(const ConstTensorView& bias,
                                            const ConstTensorView& mask, const Extents& shape);

}  // namespace annulus
