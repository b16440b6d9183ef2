#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

// The kernels around cuDNN's backward pass: its contract has an output and gradients of the
// problem's dtype where ours has delta and float32 sums. All tensors are on the stream's device.
namespace annulus::cuda {

/// The data of a block's rows that cuDNN reads, contiguous.
struct SdpaRows {
  TensorView output;       ///< [b,t,n,Dv], of the dtype of dO
  TensorView grad_output;  ///< likewise
  TensorView lse;          ///< [b,n,t], float32
};

/// cuDNN computes rowsum(dO ∘ O) itself, so `rows.output` is the shortest vector that gives `delta`
/// there: delta · dO / ‖dO‖². It is no longer than the true output wherever delta is rowsum(dO ∘
/// O). A row whose LSE is −∞ gets output and dO 0, whatever it held, and an LSE that makes its
/// weights 0. `grad_output` [b,t,n,Dv] is float16 or bfloat16, `lse` and `delta` [b,n,t] float32.
void make_sdpa_rows(const ConstTensorView& grad_output, const ConstTensorView& lse,
                    const ConstTensorView& delta, const SdpaRows& rows, Stream& stream);

/// Adds `part` to `sum`, both [b,s,n,D]: `part` of float16 or bfloat16, `sum` float32. Of batch i
/// only the first lengths[i] of s count, if there are lengths (int32 [b], contiguous).
void add_rounded(const ConstTensorView& part, const ConstTensorView& lengths, const TensorView& sum,
                 Stream& stream);

}  // namespace annulus::cuda
