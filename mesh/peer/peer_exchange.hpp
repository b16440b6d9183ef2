#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include <annulus/mesh/group.hpp>

#include "peer/flags.hpp"

namespace annulus::peer {

/// A message that this rank writes into the memory of a peer.
struct OutgoingMessage {
  Flag open;                              ///< raised by the peer: its buffer may be overwritten
  std::uint32_t* peer_arrived = nullptr;  ///< the peer's flag: the data are there
  const void* source = nullptr;
  void* destination = nullptr;  ///< the peer's memory, mapped
  std::size_t bytes = 0;
};

/// A message that a peer writes here.
struct IncomingMessage {
  Flag arrived;
  std::uint32_t* peer_open = nullptr;
};

struct OwnCopy {
  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;
};

/// An exchange of which everything is mapped. The sender's copy engines write: they move more than
/// reading ones do, and owe nothing to the receiver but its consent. All flags are down between two
/// posts: a post, or a replay of a captured one, leaves no trace for the next.
class PeerExchange final : public PreparedExchange {
 public:
  PeerExchange(FlagBlock& flags, std::vector<OutgoingMessage> outgoing,
               std::vector<IncomingMessage> incoming, std::vector<OwnCopy> copies);
  /// While an exception is on its way, first frees the device of work that waits for peers.
  ~PeerExchange() override;
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  void open(Stream& stream) override;
  void start(Stream& stream) override;
  void finish(Stream& stream, std::uint32_t mark) override;

 private:
  FlagBlock& flags_;
  std::vector<OutgoingMessage> outgoing_;
  std::vector<IncomingMessage> incoming_;
  std::vector<OwnCopy> copies_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace annulus::peer
