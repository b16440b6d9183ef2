#include "composite/message_split.hpp"

namespace annulus {

SplitMessages split_messages(std::span<const Send> sends, std::span<const Receive> receives,
                             int rank, const PeerReach& reach) {
  SplitMessages split;
  const auto part = [&](int peer) -> Messages& {
    return reach.connects(rank, peer) ? split.inside : split.across;
  };
  for (const Send& send : sends) part(send.peer).sends.push_back(send);
  for (const Receive& receive : receives) part(receive.peer).receives.push_back(receive);
  return split;
}

}  // namespace annulus
