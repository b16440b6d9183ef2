#pragma once

#include <annulus/mesh/transport.hpp>

namespace annulus {

/// Host memory by MPI: messages move when somebody asks after them, most of all between blocks.
inline constexpr TransportTraits kMpiTraits{.name = "mpi"};

}  // namespace annulus
