#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::ring::cuda {

/// See LocalOperations::sink_state.
void sink_state(const ConstTensorView& sinks, const TensorView& logits, const TensorView& lse,
                const TensorView& maximum, Stream& stream);

/// See LocalOperations::sink_gradient.
void sink_gradient(const ConstTensorView& sinks, const ConstTensorView& lse,
                   const ConstTensorView& delta, const TensorView& grad_sinks, Stream& stream);

}  // namespace annulus::ring::cuda
