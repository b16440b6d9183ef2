#pragma once

#include <memory>

#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// All ranks of a communicator, which is duplicated when the mesh starts. Null for MPI_COMM_NULL.
[[nodiscard]] std::unique_ptr<Bootstrap> make_mpi_bootstrap(MPI_Comm communicator);

}  // namespace annulus
