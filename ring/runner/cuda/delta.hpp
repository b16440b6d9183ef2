#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::ring::cuda {

/// See LocalOperations::delta. Outputs of float16, bfloat16 or float32, of one dtype.
void delta(const ConstTensorView& output, const ConstTensorView& grad_output,
           const ConstTensorView& grad_lse, const TensorView& delta, Stream& stream);
}  // namespace annulus::ring::cuda
