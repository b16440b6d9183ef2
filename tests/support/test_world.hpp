#pragma once

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus::test {

/// The MPI session of this test program: one rank without MPI unless mpirun started it.
[[nodiscard]] const MpiSession& session();

/// Long enough for a loaded machine, short enough to see a hang.
inline const Watchdog kWatchdog{Watchdog::Seconds(60)};

}  // namespace annulus::test
