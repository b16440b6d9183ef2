// The parts of annulus that call MPI, in a library of their own: see mpi_loader.cpp.
#include <annulus/core/error.hpp>
#include <annulus/mesh/mpi_runtime.hpp>

extern "C" const annulus::MpiRuntime* annulus_mpi_start(int (*interrupted)()) {
  annulus::set_interruption(interrupted);
  return &annulus::mpi_runtime();
}
