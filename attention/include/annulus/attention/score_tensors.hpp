#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// The tensors of a call that have an entry for each logit, as views [b,n,t,S]: the batches, query
/// heads and rows of the call, and all keys of the problem. Keys are indexed by global position, so
/// that the columns of a block may come in any order. A dimension that is broadcast has stride 0;
/// the last one otherwise has stride 1.
///
/// A pair is hidden where the mask is 0, and where the bias is −∞: a mask given as a bias then
/// means the same as a mask, also for a row that sees nothing. What hidden pairs hold reaches no
/// row.
struct ScoreTensors {
  std::optional<ConstTensorView> bias = {};  ///< float32
  std::optional<ConstTensorView> mask = {};  ///< boolean: visible where not 0

  [[nodiscard]] bool empty() const noexcept { return !bias && !mask; }
  /// Whether they leave a pair visible. All indices but the column are local. Host tensors only.
  [[nodiscard]] bool shows(std::int64_t batch, std::int64_t head, std::int64_t row,
                           GlobalPosition column) const {
    if (mask && mask->at<std::uint8_t>({batch, head, row, column.value()}) == 0) return false;
    return !bias || bias->at<float>({batch, head, row, column.value()}) !=
                        -std::numeric_limits<float>::infinity();
  }
  /// Those of some batches, heads and rows.
  [[nodiscard]] ScoreTensors slice(int dim, std::int64_t begin, std::int64_t count) const;
  /// Throws InternalError unless they are those that `problem` has, in this shape.
  void check(const AttentionProblem& problem, const Extents& shape) const;
};

/// A tensor [b,n,t,s] whose dimensions are 1 or those of `shape`, as a view of that shape: with
/// stride 0 along dimensions of size 1.
[[nodiscard]] ConstTensorView broadcast_to(const ConstTensorView& tensor, const Extents& shape);

/// Views [b,n,t,S] of a rank's parts; a tensor of rank 0 stands for none.
[[nodiscard]] ScoreTensors broadcast_scores(const ConstTensorView& bias,
                                            const ConstTensorView& mask, const Extents& shape);

}  // namespace annulus
