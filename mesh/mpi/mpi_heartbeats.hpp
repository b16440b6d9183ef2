#pragma once

#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Heartbeats between the ranks of `communicator`, which nothing else may use; see HeartbeatState.
/// A neighbour that has not taken the last one gets none. Collective, under `watchdog`.
[[nodiscard]] std::shared_ptr<Heartbeats> make_mpi_heartbeats(Communicator communicator,
                                                              Watchdog::Seconds interval,
                                                              const Watchdog& watchdog);

}  // namespace annulus
