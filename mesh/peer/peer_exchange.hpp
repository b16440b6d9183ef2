#pragma once

#include <cstddef>
#include <vector>

#include <annulus/mesh/group.hpp>

#include "peer/flags.hpp"

namespace annulus::peer {

/// The messages of an exchange that one peer pulls.
struct OutgoingMessages {
  Flag done;                        ///< raised by the peer: the data has been read
  FlagWords* peer_ready = nullptr;  ///< the peer's flag: the data may be read
};

/// A copy inside this rank's memory, or from a peer's mapped memory.
struct MemoryCopy {
  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;
};

/// The messages of an exchange that this rank pulls from one peer.
struct IncomingMessages {
  Flag ready;
  FlagWords* peer_done = nullptr;
  std::vector<MemoryCopy> copies;
};

/// An exchange with all its memory mapped. All flags are lowered between two posts, so a post or a
/// replay leaves no state for the next. To be destroyed when no post is under way, or after the
/// group has been given up.
class PeerExchange final : public PreparedExchange {
 public:
  PeerExchange(FlagBlock& flags, std::vector<OutgoingMessages> outgoing,
               std::vector<IncomingMessages> incoming, std::vector<MemoryCopy> copies);

  void offer(Stream& stream) override;
  void take(Stream& stream) override;
  void reclaim(Stream& stream) override;

 private:
  FlagBlock& flags_;
  std::vector<OutgoingMessages> outgoing_;
  std::vector<IncomingMessages> incoming_;
  std::vector<MemoryCopy> copies_;
};

}  // namespace annulus::peer
