#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Longest single MPI message: larger ones travel in pieces, so that counts fit an int.
inline constexpr std::size_t kMpiChunkBytes = std::size_t{64} << 20;

/// The ranks `members` of `communicator`, in this order, as a group that moves host memory. Errors
/// call each rank by its number in the communicator, which is that in the mesh, with mpirun's in
/// brackets where it is another. Owns the communicator, on which only groups without common ranks
/// may have other traffic; local apart from that. Work submitted to streams must finish before the
/// group is destroyed. `chunk_bytes` (1 … 2³¹−1) must be the same on every rank.
///
/// Exchanges need a host stream. A trace shows each as one transfer span, whose peer is the first
/// one received from and whose bytes are those received from and sent to other ranks.
[[nodiscard]] std::unique_ptr<Group> make_mpi_group(Communicator communicator,
                                                    std::vector<int> members, Watchdog watchdog,
                                                    std::size_t chunk_bytes = kMpiChunkBytes);
/// All ranks of `communicator`.
[[nodiscard]] std::unique_ptr<Group> make_mpi_group(Communicator communicator, Watchdog watchdog,
                                                    std::size_t chunk_bytes = kMpiChunkBytes);
/// Their control calls alone.
[[nodiscard]] std::shared_ptr<Control> make_mpi_control(Communicator communicator,
                                                        Watchdog watchdog);

}  // namespace annulus
