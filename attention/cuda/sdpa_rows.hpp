#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

// The kernels around cuDNN's backward pass: its contract has an output and gradients of the
// problem's dtype where ours has delta and float32 sums. All tensors are on the stream's device.
namespace annulus::cuda {

/// cuDNN computes rowsum(dO ∘ O) itself, so `output` is the shortest vector that gives `delta`
/// there: delta · dO / ‖dO‖². It is no longer than the true output wherever delta is rowsum(dO ∘
/// O). A row whose LSE is −∞ gets output 0, and an LSE that makes its weights 0. `grad_output` and
/// `output` [b,t,n,Dv] are float16 or bfloat16, the others [b,n,t] float32.
void make_sdpa_rows(const ConstTensorView& grad_output, const ConstTensorView& lse,
                    const ConstTensorView& delta, const TensorView& output,
                    const TensorView& finite_lse, Stream& stream);

/// Adds `part` to `sum`, both [b,s,n,D]: `part` of float16 or bfloat16, `sum` float32. Of batch i
/// only the first lengths[i] of s count, if there are lengths (int32 [b], contiguous).
void add_rounded(const ConstTensorView& part, const ConstTensorView& lengths, const TensorView& sum,
                 Stream& stream);

}  // namespace annulus::cuda
