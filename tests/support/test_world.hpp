#pragma once

#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus::test {

class FileStore;

/// The MPI session of this test program: one rank without MPI unless mpirun started it.
[[nodiscard]] const MpiSession& session();

/// The store of this test program's ranks if tests/support/store_ranks.py started it; else null.
[[nodiscard]] const std::shared_ptr<FileStore>& store();

/// This rank, and the number of ranks, by mpirun or on a store.
[[nodiscard]] int rank();
[[nodiscard]] int size();
/// Connects all ranks; null for one rank alone.
[[nodiscard]] std::unique_ptr<Bootstrap> bootstrap();

/// Long enough for a loaded machine, short enough to see a hang.
inline const Watchdog kWatchdog{Watchdog::Seconds(60)};

}  // namespace annulus::test
