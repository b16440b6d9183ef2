#pragma once

#include <span>

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>

namespace annulus::cuda {

/// Copies between views of equal shape and dtype, of any strides, on the stream's device, which is
/// current. Takes one launch for a few dozen views of up to four dimensions.
void copy(std::span<const TensorCopy> copies, Stream& stream);

}  // namespace annulus::cuda
