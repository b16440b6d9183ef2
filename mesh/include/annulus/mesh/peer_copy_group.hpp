#pragma once

#include <memory>

#include <annulus/core/place.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/peer_reach.hpp>

namespace annulus {

/// The ranks of `host` that can copy out of each other's memory, each on its CUDA device `place`:
/// ranks of one node whose devices have access to each other, or that share a device. Collective
/// over `host`, the same on every rank.
[[nodiscard]] PeerReach peer_copy_reach(Group& host, Place place);

/// A group for memory of the CUDA device `place`, for messages between ranks that reach each other.
/// The receiver's copy engines pull a message out of the sender's memory, mapped by CUDA IPC,
/// without multiprocessors. `host` takes the control calls and must outlive the group. Collective
/// over `host`. Throws UnsupportedError without CUDA, else an error that all ranks agree on.
/// Transport "peer".
///
/// It is made for prepared exchanges, whose posts consist of copies, and of writes to and waits for
/// flags in device memory. So they can be captured into a CUDA graph and replayed. An unprepared
/// exchange is prepared on the spot: it blocks until its peers do the same, and cannot be captured.
///
/// Buffers must come from cudaMalloc, as all of exchange_memory() does; that memory is kept until
/// the group ends. Other buffers must not be freed before then either, since peers have them
/// mapped. Prepared exchanges must finish their work and be destroyed before the group.
[[nodiscard]] std::unique_ptr<Group> make_peer_copy_group(Group& host, Place place,
                                                          const Watchdog& watchdog);

}  // namespace annulus
