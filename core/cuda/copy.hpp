#pragma once

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::cuda {

/// Copies between views of equal shape and dtype, of any strides, on the stream's device, which is
/// current. Takes one launch, or one for every entry of the dimensions in front of the last four.
void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream);

}  // namespace annulus::cuda
