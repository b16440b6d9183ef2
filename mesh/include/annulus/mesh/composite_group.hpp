#pragma once

#include <memory>

#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/mesh/peer_reach.hpp>

namespace annulus {

/// A group in which `inside` carries messages between ranks of one P2P clique, and from a rank to
/// itself, while `across` carries all others at the same time. Both groups have the ranks of
/// `host`, in its order, and memory at one place. `host` takes the control calls and must outlive
/// the group. Transport "composite".
///
/// Exchanges are two-sided: they end when both groups have sent and received. Errors, and
/// requirements for buffers, come from the two groups.
[[nodiscard]] std::unique_ptr<Group> make_composite_group(Group& host, PeerReach reach,
                                                          std::unique_ptr<Group> inside,
                                                          std::unique_ptr<Group> across,
                                                          const Watchdog& watchdog);

}  // namespace annulus
