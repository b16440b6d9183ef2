#pragma once

#include <cstdint>
#include <span>

#include <annulus/core/tensor.hpp>

namespace annulus {

/// A softmax-weighted sum over some of the keys: output [B,t,N,Dv], normalised over those keys, and
/// the log of the sum of their exponentials, LSE, float32 or float64 [B,N,t].
///
/// Partial results form a commutative monoid. The empty element is (0, −∞); the product is the
/// merge of docs/semantics.md §1 (the online softmax of Milakov & Gimelshein 2018, blockwise as in
/// Liu et al. 2023, Ring Attention, §3). The caller chooses the order of merging; the same order
/// gives the same bits.
///
/// A row may see keys and still have only logits of −∞, from the input or from products beyond
/// float32. Such a row has no weight, and its output alone is 0/0. Its element is (NaN, −∞): a
/// merge with any element that has weight removes it; otherwise it stays.
///
/// The absolute error of an LSE becomes the relative error of a weight. A float32 LSE near 10 is
/// good to 5e-7 only, as much as all other errors of a float32 run together. States that will be
/// merged should therefore keep the LSE in float64, which costs little beside Dv outputs, and round
/// it to float32 at the end.
///
/// The maximum, float32 [B,N,t], is the row's largest logit, −∞ if it sees nothing and NaN if its
/// LSE is NaN. A view without dimensions: not wanted.
struct SoftmaxState {
  TensorView output;
  TensorView lse;
  TensorView maximum = {};

  [[nodiscard]] bool wants_maximum() const { return maximum.rank() > 0; }
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

/// The dtype of partial outputs: float64 if the problem's tensors are float64, else float32.
[[nodiscard]] constexpr DType partial_dtype(DType problem) noexcept {
  return problem == DType::float64 ? DType::float64 : DType::float32;
}

/// A result for some rows and heads of a larger one. Row r and head n of `state` are row
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

/// The most parts that one combine() must accept: as many as a device takes in one launch.
inline constexpr int kMaximumParts = 32;

/// The form of a combined row.
enum class SoftmaxForm : std::uint8_t {
  normalised,   ///< as a SoftmaxState
  unnormalised  ///< the output times exp(LSE − maximum), and this sum in place of the LSE
};

/// Sets each row of `result` to the product of the parts that cover it, in their order, or to the
/// empty element if none does: (0, 0) with maximum −∞ if unnormalised. The maximum is the largest
/// of the parts' maxima; all parts must have one if the result has, and an unnormalised result must
/// have one. If the LSE of a part is −∞, only the first element of its output is read, which may be
/// NaN. The output of `result` has any floating dtype and is rounded once; its LSE is float32 or
/// float64. The outputs of the parts have the partial_dtype() of that dtype. Output, LSE and
/// maximum of `result` may each share the memory of one part. All tensors are in host memory; Dv is
/// innermost with stride 1, and other strides are free. Throws InternalError for other strides or
/// dtypes, for a part outside the result, and for a maximum that is missing.
void combine(std::span<const PartialState> parts, const SoftmaxState& result,
             SoftmaxForm form = SoftmaxForm::normalised);

}  // namespace annulus
