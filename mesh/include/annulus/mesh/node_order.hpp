#pragma once

#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/topology.hpp>

namespace annulus {

/// All ranks, node by node: nodes in order of their first rank, ranks of a node in ascending order.
/// Rank 0 stays first.
[[nodiscard]] std::vector<int> node_order(const Topology& topology);

/// Returns a communicator that numbers the ranks of `communicator` in node_order(). The fast axes
/// of a mesh over these ranks then lie inside nodes, however the launcher has distributed the
/// ranks. A rank's number may change, and with it the shard that the rank holds. Collective, at any
/// thread level of MPI. MPI_COMM_NULL gives MPI_COMM_NULL. Throws TimeoutError, naming missing
/// ranks; ArgumentError on all ranks for a bad ANNULUS_NODE on one. MPI_Comm_split cannot be
/// interrupted: if a rank stops within it, the process calls `last_word` and exits with code 3.
[[nodiscard]] Communicator in_node_order(MPI_Comm communicator, const Watchdog& watchdog,
                                         MpiSession::LastWord last_word = {});

}  // namespace annulus
