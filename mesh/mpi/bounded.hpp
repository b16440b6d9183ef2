#pragma once

#include <string_view>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

#include "mpi/deadline.hpp"

namespace annulus {

// MPI's collective calls under a watchdog. A timeout names `what` and a missing rank, by its number
// in `communicator`, and by mpirun's if it differs. Ranks meet before the call, by short messages
// on `communicator` with the tags 32650 to 32652.

/// A communicator over the same ranks, whose errors come back as codes.
[[nodiscard]] Communicator duplicate(MPI_Comm communicator, const Watchdog& watchdog,
                                     std::string_view what);
/// MPI_Comm_split; null if `color` is MPI_UNDEFINED. If a rank stops after all have arrived, this
/// process reports it by `last_word` and exits: see Deadline.
[[nodiscard]] Communicator split(MPI_Comm communicator, int color, int key,
                                 const Watchdog& watchdog, std::string_view what,
                                 Deadline::LastWord last_word);
/// Returns once all ranks have arrived.
void meet(MPI_Comm communicator, const Watchdog& watchdog, std::string_view what);

}  // namespace annulus
