#pragma once

#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Signs of life between all ranks of `communicator`, which nothing else uses: empty messages, at
/// most one per `interval` and peer, and none to a peer that has not taken the last.
[[nodiscard]] std::shared_ptr<LifeSigns> make_mpi_life_signs(Communicator communicator,
                                                             Watchdog::Seconds interval);

}  // namespace annulus
