#pragma once

#include <cstdint>
#include <memory>

#include <annulus/attention/implementation.hpp>
#include <annulus/attention/local_mask.hpp>

namespace annulus {

// The problems that cuDNN's scaled dot-product attention takes. Every build can answer this.

inline constexpr std::int64_t kSdpaVector =
    8;  ///< elements; head dimensions and strides are multiples of it

[[nodiscard]] Capability sdpa_accepts(const AttentionProblem& problem, Place place);
[[nodiscard]] Capability sdpa_takes(const AttentionProblem& problem, const BlockGeometry& block);
[[nodiscard]] Capability sdpa_takes_backward(const AttentionProblem& problem,
                                             const BlockGeometry& block);
/// The mask of a block in local indices.
[[nodiscard]] LocalMask sdpa_mask(const AttentionProblem& problem, const BlockGeometry& block);
/// The same for the backward pass. Batches have lengths, even if all of them are whole, unless the
/// columns fill whole tiles of cuDNN.
[[nodiscard]] LocalMask sdpa_backward_mask(const AttentionProblem& problem,
                                           const BlockGeometry& block);
/// True if a side of a band hides anything.
[[nodiscard]] bool is_limited(std::int64_t side);

// cuDNN itself. A build may lack it.

[[nodiscard]] Capability sdpa_available(Place place);
[[nodiscard]] std::unique_ptr<Kernel> make_sdpa_kernel(const AttentionProblem& problem,
                                                       Device& device);

}  // namespace annulus
