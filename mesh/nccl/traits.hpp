#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {

/// NCCL's kernels on their own stream, one per exchange. NCCL matches calls by their order on all
/// ranks, and does not match captured calls with eager ones.
inline constexpr TransportTraits kNcclTraits{.name = "nccl",
                                             .choice = Transport::nccl,
                                             .ahead = true,
                                             .starts_once = true,
                                             .on_multiprocessors = true,
                                             .uniform_calls = true};

}  // namespace annulus
