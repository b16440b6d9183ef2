#pragma once

#include <memory>

#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Connects all ranks of a communicator, which is duplicated when the mesh starts. Returns null for
/// MPI_COMM_NULL.
[[nodiscard]] std::unique_ptr<Bootstrap> make_mpi_bootstrap(MPI_Comm communicator);

}  // namespace annulus
