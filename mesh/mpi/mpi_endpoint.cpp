#include "mpi/mpi_endpoint.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus {

std::vector<int> ranks_in_world(MPI_Comm communicator, const std::vector<int>& ranks) {
  std::vector<int> translated(ranks.size());
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Group world = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(communicator, &group), "MPI_Comm_group");
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check_mpi(MPI_Group_translate_ranks(group, static_cast<int>(ranks.size()), ranks.data(), world,
                                      translated.data()),
            "MPI_Group_translate_ranks");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  return translated;
}

std::string rank_name(int rank, int mpirun_rank) {
  return mpirun_rank == rank ? fmt::format("rank {}", rank)
                             : fmt::format("rank {} (mpirun rank {})", rank, mpirun_rank);
}

MpiRanks::MpiRanks(MPI_Comm ranks, std::vector<int> group_members, std::size_t chunk)
    : communicator(ranks), members(std::move(group_members)), chunk_bytes(chunk) {
  if (chunk_bytes < 1 || chunk_bytes > std::numeric_limits<int>::max()) {
    throw ArgumentError("chunk_bytes", std::to_string(chunk_bytes), "1 to 2^31 - 1");
  }
  int own = 0;
  check_mpi(MPI_Comm_rank(communicator, &own), "MPI_Comm_rank");
  const auto found = std::find(members.begin(), members.end(), own);
  if (found == members.end()) {
    throw InternalError(fmt::format("rank {} makes a group that it is not in", own));
  }
  rank = static_cast<int>(found - members.begin());
  world_ranks = ranks_in_world(communicator, members);
}

std::string MpiRanks::name_of(int peer) const {
  return rank_name(member(peer), world_ranks[static_cast<std::size_t>(peer)]);
}

std::string MpiRanks::name_of_member(int one) const {
  return name_of(
      static_cast<int>(std::find(members.begin(), members.end(), one) - members.begin()));
}

std::vector<int> all_members(MPI_Comm communicator) {
  int size = 0;
  check_mpi(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  std::vector<int> members(static_cast<std::size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

MpiEndpoint::MpiEndpoint(Communicator ranks, std::vector<int> group_members, std::size_t chunk)
    : MpiRanks(ranks.get(), std::move(group_members), chunk), owned(std::move(ranks)) {
  check_mpi(MPI_Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

}  // namespace annulus
