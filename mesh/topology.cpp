#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <unistd.h>

#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/topology.hpp>

namespace annulus {
namespace {

// What every rank tells the others about its place.
struct Seat {
  int leader = 0;  // the lowest rank of the node
  int local_rank = 0;
  std::array<char, MPI_MAX_PROCESSOR_NAME> host{};
};

Seat find_seat(MPI_Comm communicator, int rank) {
  Seat seat;
  MPI_Comm raw = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &raw),
            "MPI_Comm_split_type");
  const Communicator node(raw);
  seat.leader = rank;
  check_mpi(MPI_Bcast(&seat.leader, 1, MPI_INT, 0, node.get()), "MPI_Bcast");
  check_mpi(MPI_Comm_rank(node.get(), &seat.local_rank), "MPI_Comm_rank");
  int length = 0;
  check_mpi(MPI_Get_processor_name(seat.host.data(), &length), "MPI_Get_processor_name");
  return seat;
}

}  // namespace

int Topology::ranks_on_node(int node) const {
  return static_cast<int>(std::count(node_of_rank.begin(), node_of_rank.end(), node));
}

Topology Topology::single() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) return {{0}, {0}, {"localhost"}};
  return {{0}, {0}, {host.data()}};
}

Topology Topology::discover(MPI_Comm communicator) {
  int rank = 0;
  int size = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  const Seat mine = find_seat(communicator, rank);
  std::vector<Seat> seats(static_cast<std::size_t>(size));
  check_mpi(MPI_Allgather(&mine, sizeof(Seat), MPI_BYTE, seats.data(), sizeof(Seat), MPI_BYTE,
                          communicator),
            "MPI_Allgather");
  Topology topology;
  std::map<int, int> node_of_leader;
  for (const Seat& seat : seats) {
    const auto [node, is_new] = node_of_leader.try_emplace(seat.leader, topology.nodes());
    if (is_new) topology.node_names.emplace_back(seat.host.data());
    topology.node_of_rank.push_back(node->second);
    topology.local_rank_of_rank.push_back(seat.local_rank);
  }
  return topology;
}

}  // namespace annulus
