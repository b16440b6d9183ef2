#pragma once

#include <span>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

/// The functions of softmax_state.hpp for tensors on the stream's device; only in builds with CUDA.
/// The stream orders all work, and no function waits. The output of a state [b,t,n,Dv], Dv
/// innermost with stride 1, is float32, float16 or bfloat16, as kernels return it; its LSE [b,n,t]
/// has any strides, float32 or float64; its maximum, if any, has any strides. Throws InternalError
/// for anything else.
namespace annulus::cuda {

/// Makes every row the empty element.
void reset(const SoftmaxState& state, Stream& stream);
/// Makes the rows of batch i from lengths[i] on the empty element; `lengths` is int32 [b],
/// contiguous, on the device.
void reset_beyond(const ConstTensorView& lengths, const SoftmaxState& state, Stream& stream);
/// See annulus::combine. The weights and sums are float32, and every row is rounded once. The
/// outputs that are not float32 share one dtype; with a maximum, the outputs of the parts are
/// float32. A part that lies in the result's memory and has no part to merge with is not touched.
void combine(std::span<const PartialState> parts, const SoftmaxState& result, Stream& stream,
             SoftmaxForm form = SoftmaxForm::normalised);

}  // namespace annulus::cuda
