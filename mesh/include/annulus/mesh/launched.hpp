#pragma once

#include <functional>
#include <optional>

#include <annulus/core/error.hpp>

/// Reads the environment variables that launchers (mpirun, srun, torchrun) set for their processes.
namespace annulus {

/// The value of an environment variable, null if it is not set; std::getenv outside tests.
using EnvironmentLookup = std::function<const char*(const char* name)>;

/// True if mpirun or srun started this process in a way that lets MPI connect the ranks. Throws
/// LibraryError with the fix if Slurm or torchrun started processes that cannot find each other.
[[nodiscard]] bool started_by_launcher(const EnvironmentLookup& lookup);

/// Throws LibraryError with the fix if MPI started with one rank in a process that a launcher
/// started as one of several. Then MPI does not speak the launcher's protocol (srun --mpi=pmi2, or
/// the mpiexec of another MPI), and each process would compute everything alone. `ranks` is the
/// size of MPI_COMM_WORLD.
void check_connected(int ranks, const EnvironmentLookup& lookup);

/// The number of a process among all that were started together.
struct ProcessNumber {
  int number = 0;
  const char* variable = nullptr;  ///< its source
  bool of_mpi = true;              ///< the launcher lets MPI connect the processes
};
/// Nothing if no launcher started this process, or started it alone. Needs no MPI.
[[nodiscard]] std::optional<ProcessNumber> process_number(const EnvironmentLookup& lookup);

}  // namespace annulus
