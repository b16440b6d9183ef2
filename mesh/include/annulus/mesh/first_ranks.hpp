#pragma once

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// A communicator of the first `count` ranks of `communicator`, with their numbers; null on other
/// ranks, and for MPI_COMM_NULL. Collective over `communicator`, at any thread level of MPI. Throws
/// TimeoutError, naming missing ranks. MPI_Comm_split cannot be interrupted: if a rank stops within
/// it, the process calls `last_word` and exits with code 3.
[[nodiscard]] Communicator first_ranks(MPI_Comm communicator, int count, const Watchdog& watchdog,
                                       MpiSession::LastWord last_word);

}  // namespace annulus
