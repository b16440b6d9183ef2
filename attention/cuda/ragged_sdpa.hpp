#pragma once

#include <memory>

#include <annulus/attention/implementation.hpp>

namespace annulus {

/// cuDNN for blocks of many documents: one call for all of those whose lengths are alike, wherever
/// they lie, instead of one for each. It takes what ragged_groups() can group of the block's
/// straight pieces, and rounds results to the problem's dtype; prepare() throws UnsupportedError
/// for the rest. No implementation uses it until its tests (CudaRaggedSdpa) have passed on a GPU.
[[nodiscard]] std::unique_ptr<Kernel> make_ragged_sdpa_kernel(const AttentionProblem& problem,
                                                              Device& device);

}  // namespace annulus
