#pragma once

#include <memory>
#include <string>

#include <annulus/mesh/bootstrap.hpp>

namespace annulus {

/// The parts of MPI that callers of the C interface need. A program that links MPI has them from
/// the start. The library of the Python package does not link MPI (python/mpi_loader.cpp).
struct MpiRuntime {
  /// `communicator` points to an MPI_Comm.
  std::unique_ptr<Bootstrap> (*bootstrap)(const void* communicator);
  /// The first line of MPI_Get_library_version(), which needs no MPI_Init.
  std::string (*library)();
};

/// Loads MPI if need be. Throws LibraryError if that fails.
[[nodiscard]] const MpiRuntime& mpi_runtime();
/// Null if MPI has not been loaded.
[[nodiscard]] const MpiRuntime* loaded_mpi_runtime();

}  // namespace annulus
