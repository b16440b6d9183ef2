#pragma once

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

/// As softmax_state.hpp, for tensors on the stream's device; only in builds with CUDA. Everything
/// is ordered by the stream and nothing waits. A state has float32 output [b,t,n,Dv], Dv innermost
/// with stride 1, and float32 LSE [b,n,t] of any strides; where a *narrow* one is allowed its
/// output may also be float16 or bfloat16, as a kernel that computes in these hands it over. Throws
/// InternalError for anything else.
namespace annulus::cuda {

/// Makes every row the empty element; narrow allowed.
void reset(const SoftmaxState& state, Stream& stream);
/// state := state · partial in float32; the partial may be narrow. Sixteen bytes per access where
/// addresses and strides are multiples of that.
void merge(const SoftmaxState& state, const SoftmaxState& partial, Stream& stream);
/// result := narrow, output and LSE.
void widen(const SoftmaxState& narrow, const SoftmaxState& result, Stream& stream);
/// Rounds the output once into `output` (float16, bfloat16 or float32, Dv innermost).
void round_output(const SoftmaxState& state, const TensorView& output, Stream& stream);
/// Copies elements between views of equal shape and dtype, of up to four dimensions and any
/// strides.
void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream);

}  // namespace annulus::cuda
