
#include <annulus/mesh/mpi_bootstrap.hpp>
#include <annulus/mesh/node_order.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {

Context::Context(MPI_Comm communicator, const ContextOptions& options)
    : Context(make_mpi_bootstrap(communicator), options) {}
Context::Context(MPI_Comm communicator, const MeshShape& mesh, Context& base)
    : Context(make_mpi_bootstrap(communicator), mesh, base) {}

MPI_Comm in_node_order(MPI_Comm communicator) {
  return in_node_order(communicator, Watchdog(Watchdog::kDefault)).release();
}

}  // namespace annulus
