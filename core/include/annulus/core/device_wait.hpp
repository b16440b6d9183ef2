#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <annulus/core/stream.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

/// A device's queue of work, for a thread that waits for its end.
struct DeviceQueue {
  std::function<bool()> idle;            ///< throws if the device has failed
  std::function<std::uint64_t()> moved;  ///< changes as the work goes on
  std::string description;               ///< "compute: waiting for cuda:0"
};

/// Waits until `queue` is idle. Sends heartbeats whenever it has moved, or when waiting.computing()
/// says that this rank waits only for its own work. Throws TimeoutError if nothing moves for the
/// watchdog's timeout, or for kComputingTimeouts timeouts while the device computes.
void wait_for_device(const DeviceQueue& queue, const Waiting& waiting, const Watchdog& watchdog);

}  // namespace annulus
