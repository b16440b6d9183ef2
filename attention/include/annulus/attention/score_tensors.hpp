#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// Bias and dense mask of a call, as views [b,n,t,S]: batches, query heads and rows are those of
/// the call, keys are all those of the problem, by global position, so the columns of the call may
/// be in any order. Or views [b,n,t,s] of the keys of the call only, by column. Broadcast
/// dimensions have stride 0; unless it is broadcast, the last dimension has stride 1.
///
/// A pair is hidden where the mask is 0 or the bias is −∞. A mask given as a bias of 0 and −∞
/// therefore means the same as a dense mask, also for rows that see no key. Bias entries of hidden
/// pairs affect nothing.
struct ScoreTensors {
  std::optional<ConstTensorView> bias = {};  ///< float32
  std::optional<ConstTensorView> mask = {};  ///< boolean: a pair is visible where it is not 0
  bool by_column = false;  ///< keys are the columns of the call, rather than all of the problem

  [[nodiscard]] bool empty() const noexcept { return !bias && !mask; }
  /// Indices in the last dimension: first, first + step, …
  struct Keys {
    std::int64_t first = 0;
    std::int64_t step = 1;
    std::int64_t count = 0;
  };
  /// Those of neighbouring columns of the call, the first of which is its column `first`.
  [[nodiscard]] Keys keys_of(std::int64_t first, const PositionRange& positions) const {
    if (by_column) return {first, 1, positions.length};
    return {positions.start.value(), positions.stride, positions.length};
  }
  [[nodiscard]] std::int64_t key_of(std::int64_t column, GlobalPosition position) const {
    return by_column ? column : position.value();
  }
  /// True if both leave a pair visible. Batch, head and row are local indices. Host tensors only.
  [[nodiscard]] bool shows(std::int64_t batch, std::int64_t head, std::int64_t row,
                           std::int64_t key) const {
    if (mask && mask->at<std::uint8_t>({batch, head, row, key}) == 0) return false;
    return !bias ||
           bias->at<float>({batch, head, row, key}) != -std::numeric_limits<float>::infinity();
  }
  /// The views of `count` batches, heads, rows or keys, from `begin` on.
  [[nodiscard]] ScoreTensors slice(int dim, std::int64_t begin, std::int64_t count) const;
  /// Throws InternalError unless there are views of just what `problem` has, for queries of this
  /// shape, [b,t,n,D], and so many columns.
  void check(const AttentionProblem& problem, const Extents& query, std::int64_t columns) const;
};

/// A view of `tensor` in the shape `shape`; each dimension of `tensor` is 1, and then gets stride
/// 0, or that of `shape`.
[[nodiscard]] ConstTensorView broadcast_to(const ConstTensorView& tensor, const Extents& shape);

/// Views [b,n,t,S] of a rank's parts; a tensor without dimensions stands for none.
[[nodiscard]] ScoreTensors broadcast_scores(const ConstTensorView& bias,
                                            const ConstTensorView& mask, const Extents& shape);

}  // namespace annulus
