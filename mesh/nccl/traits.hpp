#pragma once

#include <annulus/mesh/transport.hpp>

namespace annulus {

/// Kernels of NCCL on a stream of their own. NCCL matches calls by their order on all ranks, and
/// takes captured and eager ones for different things.
inline constexpr TransportTraits kNcclTraits{
    .name = "nccl", .choice = Transport::nccl, .ahead = true, .uniform_calls = true};

}  // namespace annulus
