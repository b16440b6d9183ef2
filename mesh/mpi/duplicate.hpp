#pragma once

#include <string_view>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// A communicator over the same ranks, whose errors come back as codes. Collective; a timeout names
/// `what` and the ranks that have not come. On `communicator` nothing is sent unless one is late.
[[nodiscard]] Communicator duplicate(MPI_Comm communicator, const Watchdog& watchdog,
                                     std::string_view what);

}  // namespace annulus
