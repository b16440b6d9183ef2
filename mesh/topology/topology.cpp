#include <algorithm>
#include <map>
#include <string>

#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/topology.hpp>

#include "topology/node_identity.hpp"

namespace annulus {

int Topology::ranks_on_node(int node) const {
  return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.end(), node));
}

Topology Topology::discover(Control& ranks) {
  // ANNULUS_NODE may be invalid on one rank only.
  const std::string seat = collectively(ranks, [] { return node_name() + '\n' + node_identity(); });
  return from_seats(ranks.gather_text(seat, "nodes of the ranks"));
}

Topology Topology::of_machines(Control& ranks) {
  return from_seats(
      ranks.gather_text(host_name() + '\n' + machine_identity(), "machines of the ranks"));
}

Topology Topology::from_seats(const std::vector<std::string>& seats) {
  Topology topology;
  std::map<std::string, int> nodes;
  std::vector<int> ranks_so_far;
  for (const std::string& seat : seats) {
    const auto [node, is_new] = nodes.try_emplace(seat, topology.nodes());
    if (is_new) {
      topology.node_names.push_back(seat.substr(0, seat.find('\n')));
      ranks_so_far.push_back(0);
    }
    topology.node_of_rank.push_back(node->second);
    topology.local_rank_of_rank.push_back(ranks_so_far[static_cast<std::size_t>(node->second)]++);
  }
  return topology;
}

}  // namespace annulus
