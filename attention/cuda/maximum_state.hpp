#pragma once

#include <span>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/stream.hpp>

namespace annulus::cuda {

/// combine() for a result with a maximum: a plain kernel, as only plain kernels give maxima. The
/// outputs of the parts are float32. Throws InternalError for other parts.
void combine_with_maximum(std::span<const PartialState> parts, const SoftmaxState& result,
                          Stream& stream, SoftmaxForm form);

}  // namespace annulus::cuda
