#pragma once

#include <functional>
#include <memory>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

/// Records the work that `body` submits to `stream` and to streams joined to it, as a CUDA graph.
[[nodiscard]] std::unique_ptr<Recording> record_graph(CudaStream& stream,
                                                      const std::function<void()>& body);

}  // namespace annulus
