#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

// The kernels before and after cuDNN's backward pass. cuDNN takes an output and returns gradients
// of the problem's dtype; our interface has delta and float32 sums instead. All tensors are on the
// stream's device.
namespace annulus::cuda {

/// The data of a block's rows that cuDNN reads, contiguous.
struct SdpaRows {
  TensorView output;       ///< [b,t,n,Dv], of the dtype of dO
  TensorView grad_output;  ///< likewise
  TensorView lse;          ///< [b,n,t], float32
};

/// Makes rows for cuDNN, which computes delta as rowsum(dO ∘ O). `rows.output` is the shortest
/// vector that gives `delta`: delta · dO / ‖dO‖². It is at most as long as the true output if delta
/// is rowsum(dO ∘ O). For a row whose LSE is −∞, output and dO become 0, and the LSE becomes a
/// number that makes its weights 0. `grad_output` [b,t,n,Dv] is float16 or bfloat16; `lse` and
/// `delta` [b,n,t] are float32.
void make_sdpa_rows(const ConstTensorView& grad_output, const ConstTensorView& lse,
                    const ConstTensorView& delta, const SdpaRows& rows, Stream& stream);

/// Adds `part` to `sum`. Both are [b,s,n,D]; `part` is float16 or bfloat16, `sum` is float32. If
/// there are lengths (int32 [b], contiguous), only the first lengths[i] positions of batch i are
/// added.
void add_rounded(const ConstTensorView& part, const ConstTensorView& lengths, const TensorView& sum,
                 Stream& stream);

}  // namespace annulus::cuda
