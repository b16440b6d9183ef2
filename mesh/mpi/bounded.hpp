#pragma once

#include <string_view>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

// MPI's collective calls under a watchdog. A timeout names `what` and the ranks that have not come.
// Nothing but the call itself is sent on `communicator` unless one is late.

/// A communicator over the same ranks, whose errors come back as codes.
[[nodiscard]] Communicator duplicate(MPI_Comm communicator, const Watchdog& watchdog,
                                     std::string_view what);
/// The same ranks with other numbers, `rank` for this one.
[[nodiscard]] Communicator renumber(MPI_Comm communicator, int rank, const Watchdog& watchdog,
                                    std::string_view what);
/// Returns once all ranks have come here.
void meet(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what);

}  // namespace annulus
