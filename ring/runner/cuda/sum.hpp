#pragma once

#include <span>

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::ring::cuda {

/// See LocalOperations::sum. Views of up to four dimensions.
void sum(std::span<const ConstTensorView> parts, const TensorView& result, Stream& stream);

}  // namespace annulus::ring::cuda
