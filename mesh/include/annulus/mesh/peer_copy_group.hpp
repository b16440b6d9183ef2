#pragma once

#include <memory>
#include <string>

#include <annulus/core/place.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>

namespace annulus {

/// Why the ranks of `host` cannot copy out of each other's memory on the CUDA devices that each
/// gives as `place`: "" if they can, else the reason ("ranks 0 and 2 are on different nodes").
/// Collective over `host`, the same on every rank. Ranks that share a device can.
[[nodiscard]] std::string peer_copy_obstacle(Group& host, Place place);

/// A group for memory of the CUDA device `place`, inside a node: a message is pulled by the
/// receiver's copy engines out of the sender's memory, mapped by CUDA IPC, and no multiprocessor
/// takes part. `host` takes the control calls and must outlive the group. Collective over `host`.
/// Throws UnsupportedError without CUDA, else an error that all ranks agree on. Transport "peer".
///
/// It is made for prepared exchanges: their posts consist of copies, and of writes to and waits for
/// flags in device memory, so they can be captured into a CUDA graph and replayed. An unprepared
/// exchange is prepared on the spot: it blocks until its peers do the same, and cannot be captured.
///
/// Buffers must be of the kind that cudaMalloc returns; those of exchange_memory() are. That memory
/// is kept until the group ends. Other buffers must not be freed before then either: the peers have
/// them mapped. Prepared exchanges must finish their work and be destroyed before the group.
[[nodiscard]] std::unique_ptr<Group> make_peer_copy_group(Group& host, Place place,
                                                          const Watchdog& watchdog);

}  // namespace annulus
