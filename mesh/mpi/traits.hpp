#pragma once

#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

namespace annulus {

/// Host memory over MPI. Messages advance only when they are polled, mostly between blocks.
inline constexpr TransportTraits kMpiTraits{.name = "mpi"};

}  // namespace annulus
