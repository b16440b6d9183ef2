#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

// The flash kernel of a build with CUDA; other builds refuse with the reason.

[[nodiscard]] Capability flash_available(Place place);
[[nodiscard]] std::unique_ptr<Kernel> make_flash_kernel(const AttentionProblem& problem,
                                                        Device& device);

}  // namespace annulus
