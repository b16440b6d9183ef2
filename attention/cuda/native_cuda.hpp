#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

// The native kernel on a CUDA device. A build without CUDA has none available.

[[nodiscard]] Capability native_cuda_available(Place place);
[[nodiscard]] std::unique_ptr<Kernel> make_native_cuda_kernel(const AttentionProblem& problem,
                                                              Device& device);

}  // namespace annulus
