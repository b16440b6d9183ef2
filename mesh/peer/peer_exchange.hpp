#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include <annulus/mesh/group.hpp>

#include "peer/flags.hpp"

namespace annulus::peer {

/// A message that a peer pulls.
struct OutgoingMessage {
  Flag done;                            ///< raised by the peer: the data has been read
  std::uint32_t* peer_ready = nullptr;  ///< the peer's flag: the data may be read
};

/// A message that this rank pulls.
struct IncomingMessage {
  Flag ready;
  std::uint32_t* peer_done = nullptr;
  const void* source = nullptr;  ///< the peer's memory, mapped
  void* destination = nullptr;
  std::size_t bytes = 0;
};

struct OwnCopy {
  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;
};

/// An exchange with all its memory mapped. All flags are down between two posts: a post, or a
/// replay of a captured one, leaves no trace for the next.
class PeerExchange final : public PreparedExchange {
 public:
  PeerExchange(FlagBlock& flags, std::vector<OutgoingMessage> outgoing,
               std::vector<IncomingMessage> incoming, std::vector<OwnCopy> copies);
  /// During an exception, first releases device work that waits for peers.
  ~PeerExchange() override;
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  void offer(Stream& stream) override;
  void take(Stream& stream) override;
  void reclaim(Stream& stream) override;

 private:
  FlagBlock& flags_;
  std::vector<OutgoingMessage> outgoing_;
  std::vector<IncomingMessage> incoming_;
  std::vector<OwnCopy> copies_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace annulus::peer
