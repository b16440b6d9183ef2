#pragma once

#include <string>
#include <vector>

#include <annulus/mesh/control.hpp>

namespace annulus {

/// The nodes of all ranks. Ranks share a node if they see the same host name and the same running
/// kernel. If ANNULUS_NODE is set, it replaces the host name.
struct Topology {
  std::vector<int> node_of_rank;        ///< node index of every rank; nodes count from 0
  std::vector<int> local_rank_of_rank;  ///< position of every rank within its node
  std::vector<std::string> node_names;  ///< host name per node

  [[nodiscard]] int nodes() const noexcept { return static_cast<int>(node_names.size()); }
  [[nodiscard]] int ranks_on_node(int node) const;

  /// Collective over `ranks`. Throws ArgumentError on all of them for a bad ANNULUS_NODE on one.
  static Topology discover(Control& ranks);
  /// The same without ANNULUS_NODE, for ranks that really share cores and GPUs.
  static Topology of_machines(Control& ranks);
  /// Made from one text per rank, "host name\nidentity", equal for ranks of the same node.
  static Topology from_seats(const std::vector<std::string>& seats);
};

}  // namespace annulus
