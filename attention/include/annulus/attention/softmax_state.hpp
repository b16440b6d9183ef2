#pragma once

#include <cstdint>
#include <span>

#include <annulus/core/tensor.hpp>

namespace annulus {

/// A softmax-weighted sum over some of the keys: output [B,t,N,Dv], normalised over those keys, and
/// the log of the sum of their exponentials, LSE, float32 or float64 [B,N,t].
///
/// Partial results form a commutative monoid: its empty element is (0, −∞), its product the merging
/// of SEMANTICS §1 (the online softmax of Milakov & Gimelshein 2018, blockwise as in Liu et al.
/// 2023, Ring Attention, §3). The order of merging is the caller's; the same order repeats every
/// bit.
///
/// A row that sees keys, but whose every logit is −∞ (an input that was so, or products beyond
/// float32), weighs as little as an empty one, though alone it is 0/0: its element is (NaN, −∞),
/// which yields to anything of weight and stays where there is nothing else.
///
/// A weight has the absolute error of its LSE for its relative one, and a float32 LSE near 10 is
/// only good to 5e-7: as much as everything else in a float32 run. States that will be merged
/// should therefore keep it in float64 (little beside Dv outputs) and round it to float32 at the
/// end.
struct SoftmaxState {
  TensorView output;
  TensorView lse;

  [[nodiscard]] double lse_at(std::int64_t batch, std::int64_t head, std::int64_t row) const {
    const void* address = lse.address({batch, head, row});
    return lse.dtype() == DType::float64 ? *static_cast<const double*>(address)
                                         : *static_cast<const float*>(address);
  }
  void set_lse_at(std::int64_t batch, std::int64_t head, std::int64_t row, double value) const {
    void* address = lse.address({batch, head, row});
    if (lse.dtype() == DType::float64) {
      *static_cast<double*>(address) = value;
    } else {
      *static_cast<float*>(address) = static_cast<float>(value);
    }
  }
};

/// A partial result of some rows and heads of a larger one: row r and head n of `state` are row
/// first_row + r and head first_head + n of the whole.
struct PartialState {
  SoftmaxState state;
  std::int64_t first_row = 0;
  std::int64_t first_head = 0;

  [[nodiscard]] bool covers(std::int64_t row, std::int64_t head) const noexcept {
    return row >= first_row && row < first_row + state.output.size(1) && head >= first_head &&
           head < first_head + state.output.size(2);
  }
};

/// The most parts that one combine() needs to take: what a device gets with one launch.
inline constexpr int kMostParts = 32;

/// result := the product, row by row, of the parts that cover the row, in their order; the empty
/// element where none does. Of the output of a part whose LSE is −∞ it only matters whether it
/// begins with a NaN. The output of `result` may be float32, float16 or bfloat16 and is rounded
/// once; its LSE may be float32 or float64. Output and LSE may each lie exactly where those of one
/// of the parts do. Works on host memory, whatever the strides, except that Dv is innermost with
/// stride 1. Throws InternalError for other strides, for dtypes other than these (a part's output
/// is float32), and for a part that does not lie within the result.
void combine(std::span<const PartialState> parts, const SoftmaxState& result);

}  // namespace annulus
