#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// Bias and dense mask of a call. Views [b,n,t,S] have the call's batches, query heads and rows,
/// and all keys of the problem by global position, so the call's columns may be in any order. Views
/// [b,n,t,s] have only the call's keys, by column. Broadcast dimensions have stride 0; otherwise
/// the last dimension has stride 1.
///
/// A pair is hidden where the mask is 0 or the bias is −∞. A mask given as a bias of 0 and −∞
/// therefore means the same as a dense mask, also for rows that see no key. Bias entries of hidden
/// pairs affect nothing.
struct ScoreTensors {
  std::optional<ConstTensorView> bias = {};  ///< float32
  std::optional<ConstTensorView> mask = {};  ///< boolean: a pair is visible where it is not 0
  bool by_column = false;  ///< keys are the columns of the call, not all of the problem

  [[nodiscard]] bool empty() const noexcept { return !bias && !mask; }
  /// Indices in the last dimension: first, first + step, …
  struct Keys {
    std::int64_t first = 0;
    std::int64_t step = 1;
    std::int64_t count = 0;
  };
  /// The indices of neighbouring columns of the call, from its column `first` on.
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
  /// Views of `count` batches, heads, rows or keys, from `begin` on.
  [[nodiscard]] ScoreTensors slice(int dim, std::int64_t begin, std::int64_t count) const;
  /// Throws InternalError unless the views match `problem`, queries of this shape, [b,t,n,D], and
  /// this many columns.
  void check(const AttentionProblem& problem, const Extents& query, std::int64_t columns) const;
};

/// A view of `tensor` in the shape `shape`. Each dimension of `tensor` equals that of `shape`, or
/// is 1 and gets stride 0.
[[nodiscard]] ConstTensorView broadcast_to(const ConstTensorView& tensor, const Extents& shape);

/// Views [b,n,t,S] of a rank's parts; without dimensions: none.
[[nodiscard]] ScoreTensors broadcast_scores(const ConstTensorView& bias,
                                            const ConstTensorView& mask, const Extents& shape);

}  // namespace annulus
