#pragma once

#include <span>
#include <vector>

#include <annulus/mesh/group.hpp>
#include <annulus/mesh/peer_reach.hpp>

namespace annulus {

/// The messages of one exchange, in their order.
struct Messages {
  std::vector<Send> sends;
  std::vector<Receive> receives;

  [[nodiscard]] bool empty() const noexcept { return sends.empty() && receives.empty(); }
};

struct SplitMessages {
  Messages inside;  ///< between ranks of one clique
  Messages across;
};

/// Sender and receiver find a message in the same part.
[[nodiscard]] SplitMessages split_messages(std::span<const Send> sends,
                                           std::span<const Receive> receives, int rank,
                                           const PeerReach& reach);

}  // namespace annulus
