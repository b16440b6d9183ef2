#pragma once

#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/mpi.hpp>

namespace annulus {

/// Heartbeats between the ranks of `communicator`, which nothing else uses; see HeartbeatState.
/// None goes to a neighbour that has not taken the last. Collective, under `watchdog`.
[[nodiscard]] std::shared_ptr<Heartbeats> make_mpi_heartbeats(Communicator communicator,
                                                              Watchdog::Seconds interval,
                                                              const Watchdog& watchdog);

}  // namespace annulus
