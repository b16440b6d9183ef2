#pragma once

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// The first `count` ranks of `communicator`, with the numbers that they have there; null on the
/// others. Collective over `communicator`, at any thread level of MPI. MPI_COMM_NULL gives
/// MPI_COMM_NULL. Throws TimeoutError, naming the ranks that do not come. MPI_Comm_split cannot be
/// interrupted: if a rank stops within it, the process calls `last_word` and exits with code 3.
[[nodiscard]] Communicator first_ranks(MPI_Comm communicator, int count, const Watchdog& watchdog,
                                       MpiSession::LastWord last_word);

}  // namespace annulus
