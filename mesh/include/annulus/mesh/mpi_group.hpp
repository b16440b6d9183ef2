#pragma once

#include <cstddef>
#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Longest single MPI message: larger ones travel in pieces, so that counts fit an int.
inline constexpr std::size_t kMpiChunkBytes = std::size_t{64} << 20;

/// The ranks of `communicator` as a group that moves host memory. Owns the communicator, which must
/// carry no other traffic; local apart from that. Work submitted to streams must finish before the
/// group is destroyed. `chunk_bytes` (1 … 2³¹−1) must be the same on every rank.
///
/// The data calls need a host stream. A trace shows each as one transfer span, whose peer is the
/// first one received from and whose bytes are those received from and sent to other ranks.
/// Ranks in messages are those of the group, with mpirun's in brackets where they differ.
[[nodiscard]] std::unique_ptr<Group> make_mpi_group(Communicator communicator, Watchdog watchdog,
                                                    std::size_t chunk_bytes = kMpiChunkBytes);

}  // namespace annulus
