#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Tags of the messages that share a group's communicator.
enum class MpiTag : int { heartbeat = 1, data, text, roll_call, here };

/// The ranks in MPI_COMM_WORLD of these ranks of `communicator`.
[[nodiscard]] std::vector<int> ranks_in_world(MPI_Comm communicator, const std::vector<int>& ranks);

/// "rank 1"; "rank 1 (mpirun rank 5)" if mpirun's number differs.
[[nodiscard]] std::string rank_name(int rank, int mpirun_rank);

/// The ranks of a group on a communicator, which must outlive it.
struct MpiRanks {
  /// `members` are the communicator's ranks in order of the group; errors call each rank by this
  /// number. Throws ArgumentError for bad `chunk_bytes`.
  MpiRanks(MPI_Comm communicator, std::vector<int> members, std::size_t chunk_bytes);

  MPI_Comm communicator = MPI_COMM_NULL;
  std::vector<int> members;
  std::vector<int> world_ranks;  ///< of the members, in MPI_COMM_WORLD
  int rank = 0;                  ///< of this process in the group
  std::size_t chunk_bytes = 0;   ///< longest single message

  [[nodiscard]] int size() const noexcept { return static_cast<int>(members.size()); }
  /// The mesh rank of a member of the group.
  [[nodiscard]] int member(int peer) const { return members[static_cast<std::size_t>(peer)]; }
  /// As rank_name(), by its number in the mesh.
  [[nodiscard]] std::string name_of(int peer) const;
  /// The same for one of the members.
  [[nodiscard]] std::string name_of_member(int member) const;
};

/// All ranks of a communicator, in its order.
[[nodiscard]] std::vector<int> all_members(MPI_Comm communicator);

/// The ranks of a group on their own communicator.
struct MpiEndpoint : MpiRanks {
  MpiEndpoint(Communicator ranks, std::vector<int> members, std::size_t chunk_bytes);

  Communicator owned;
};

}  // namespace annulus
