#pragma once

#include <string>
#include <vector>

#include <mpi.h>

namespace annulus {

/// Which ranks share a node, found by a shared-memory split.
struct Topology {
  std::vector<int> node_of_rank;        ///< node index of every rank; nodes count from 0
  std::vector<int> local_rank_of_rank;  ///< position of every rank within its node
  std::vector<std::string> node_names;  ///< host name per node

  [[nodiscard]] int nodes() const noexcept { return static_cast<int>(node_names.size()); }
  [[nodiscard]] int ranks_on_node(int node) const;

  /// One rank on this host, without MPI.
  static Topology single();
  /// Collective over `communicator`.
  static Topology discover(MPI_Comm communicator);
};

}  // namespace annulus
