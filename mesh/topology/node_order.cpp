#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include <annulus/mesh/mpi_group.hpp>
#include <annulus/mesh/node_order.hpp>

#include "mpi/bounded.hpp"

namespace annulus {

std::vector<int> node_order(const Topology& topology) {
  std::vector<int> order(topology.node_of_rank.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return topology.node_of_rank[static_cast<std::size_t>(a)] <
           topology.node_of_rank[static_cast<std::size_t>(b)];
  });
  return order;
}

Communicator in_node_order(MPI_Comm communicator, const Watchdog& watchdog,
                           MpiSession::LastWord last_word) {
  constexpr const char* kWhat = "order of the ranks";
  if (communicator == MPI_COMM_NULL) return {};
  const auto ranks = make_mpi_control(duplicate(communicator, watchdog, kWhat), watchdog);
  const std::vector<int> order = node_order(Topology::discover(*ranks));
  if (std::is_sorted(order.begin(), order.end())) return duplicate(communicator, watchdog, kWhat);
  const auto own = std::find(order.begin(), order.end(), ranks->rank());
  return split(communicator, 0, static_cast<int>(own - order.begin()), watchdog, kWhat,
               std::move(last_word));
}

}  // namespace annulus
