#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Longest single MPI message. Larger ones are sent in pieces, so that counts fit an int.
inline constexpr std::size_t kMpiChunkBytes = std::size_t{64} << 20;

/// The ranks `members` of `communicator`, in this order, as a group that moves host memory. Ranks
/// of the communicator are mesh ranks; error messages name them, with mpirun's number in brackets
/// if it differs. The group owns the communicator. Other groups may use it only if they have no
/// rank in common with this one. The call is not collective. Work submitted to streams must finish
/// before the group is destroyed. `chunk_bytes` (1 … 2³¹−1) is the same on every rank.
///
/// Exchanges need a host stream. A trace shows each as one transfer span: its peer is the first
/// rank received from, and its bytes are all bytes that this rank exchanges with other ranks.
[[nodiscard]] std::unique_ptr<Group> make_mpi_group(Communicator communicator,
                                                    std::vector<int> members, Watchdog watchdog,
                                                    std::size_t chunk_bytes = kMpiChunkBytes);
/// All ranks of `communicator`.
[[nodiscard]] std::unique_ptr<Group> make_mpi_group(Communicator communicator, Watchdog watchdog,
                                                    std::size_t chunk_bytes = kMpiChunkBytes);
/// Connects all ranks of `communicator` for control calls only.
[[nodiscard]] std::shared_ptr<Control> make_mpi_control(Communicator communicator,
                                                        Watchdog watchdog);

}  // namespace annulus
