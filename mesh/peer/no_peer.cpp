#include <annulus/core/error.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

namespace annulus {

PeerReach peer_copy_reach(Group& host, Place /*place*/) {
  return PeerReach::nowhere(host.size(), "this build has no CUDA");
}

std::unique_ptr<Group> make_peer_copy_group(Group& /*host*/, Place /*place*/,
                                            const Watchdog& /*watchdog*/) {
  throw UnsupportedError("transport peer: this build has no CUDA");
}

}  // namespace annulus
