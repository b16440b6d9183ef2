#include "peer/handshake.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/agreement.hpp>

#include "self/self_messages.hpp"

namespace annulus::peer {
namespace {

/// Text of bounded length, for messages of the handshake.
class ShortText {
 public:
  void set(const std::string& text) {
    const std::size_t length = std::min(text.size(), characters_.size() - 1);
    std::copy_n(text.begin(), length, characters_.begin());
    characters_[length] = '\0';
  }
  [[nodiscard]] std::string get() const { return characters_.data(); }

 private:
  std::array<char, 256> characters_{};
};

enum class Side : std::uint8_t { sender, receiver };

/// The description of a message that one side sends to the other.
struct Card {
  Side side = Side::sender;
  std::uint64_t bytes = 0;
  SharedAddress data;  ///< of the sender
  SharedAddress flag;  ///< that the other side will raise
  ShortText error;
};
static_assert(std::is_trivially_copyable_v<Card>);

/// A message between two ranks, from this one's side.
struct Message {
  Side side = Side::sender;
  int peer = 0;
  const void* source = nullptr;
  void* destination = nullptr;
  std::size_t bytes = 0;
  std::optional<Flag> flag;  // of the first message between the two
  Card mine;
  Card theirs;
};

class Handshake {
 public:
  Handshake(Group& host, const Watchdog& watchdog, const ExchangeLabel& label, FlagBlock& flags,
            SharedMemoryPool& memory, PeerMappings& mappings)
      : host_(host),
        watchdog_(watchdog),
        what_(label.what),
        label_{"the preparation of " + label.what, label.step},
        flags_(flags),
        memory_(memory),
        mappings_(mappings) {}

  std::unique_ptr<PeerExchange> run(const std::vector<Send>& sends,
                                    const std::vector<Receive>& receives) {
    check_messages(sends, receives, host_.rank(), host_.size());
    list_messages(sends, receives);
    attempt([&] { fill_cards(); });
    swap_cards();
    attempt([&] { check_cards(); });
    std::vector<OutgoingMessages> outgoing;
    std::vector<IncomingMessages> incoming;
    attempt([&] {
      if (error_.empty()) connect(outgoing, incoming);
    });
    agree_with_peers();
    return std::make_unique<PeerExchange>(flags_, std::move(outgoing), std::move(incoming),
                                          own_copies(sends, receives));
  }

 private:
  // Both sides list their messages in the order of the calls, sent ones first.
  void list_messages(const std::vector<Send>& sends, const std::vector<Receive>& receives) {
    for (const Send& send : sends) {
      if (send.peer == host_.rank()) continue;
      messages_.push_back({Side::sender, send.peer, send.data, nullptr, send.bytes, {}, {}, {}});
    }
    for (const Receive& receive : receives) {
      if (receive.peer == host_.rank()) continue;
      messages_.push_back(
          {Side::receiver, receive.peer, nullptr, receive.data, receive.bytes, {}, {}, {}});
    }
    for (const Message& message : messages_) peers_.insert(message.peer);
  }

  // Keeps the first error.
  template <class Body>
  void attempt(Body&& body) {
    try {
      body();
    } catch (const std::exception& error) {
      if (error_.empty()) error_ = error.what();
    }
  }

  void fill_cards() {
    for (Message& message : messages_) {
      message.mine.side = message.side;
      message.mine.bytes = message.bytes;
    }
    // One flag for all messages to a peer, and one for all messages from it; none if there are no
    // messages.
    std::set<std::pair<Side, int>> flagged;
    for (Message& message : messages_) {
      if (message.bytes == 0) continue;
      if (flagged.emplace(message.side, message.peer).second) {
        message.flag = flags_.take();
        message.mine.flag = memory_.share(message.flag->address());
      }
      if (message.side == Side::sender) message.mine.data = memory_.share(message.source);
    }
  }

  void swap_cards() {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (Message& message : messages_) {
      message.mine.error.set(error_);
      sends.push_back({message.peer, &message.mine, sizeof(Card)});
    }
    for (const Side of_peer : {Side::sender, Side::receiver}) {
      for (Message& message : messages_) {
        if (message.side == of_peer) continue;
        receives.push_back({message.peer, &message.theirs, sizeof(Card)});
      }
    }
    exchange_on_host(sends, receives);
  }

  void check_cards() {
    for (const Message& message : messages_) {
      const bool sending = message.side == Side::sender;
      const int own = host_.mesh_rank(host_.rank());
      const int sender = sending ? own : host_.mesh_rank(message.peer);
      const int receiver = sending ? host_.mesh_rank(message.peer) : own;
      if (message.theirs.side == message.side) {
        throw LibraryError(
            fmt::format("{}: ranks {} and {} disagree on who sends what", what_, sender, receiver));
      }
      const auto theirs = static_cast<std::size_t>(message.theirs.bytes);
      if (theirs != message.bytes) {
        throw LibraryError(fmt::format("{}: rank {} sends {} bytes to rank {}, which expects {}",
                                       what_, sender, sending ? message.bytes : theirs, receiver,
                                       sending ? theirs : message.bytes));
      }
    }
    for (const Message& message : messages_) {
      if (const std::string error = message.theirs.error.get(); !error.empty()) {
        throw LibraryError(fmt::format("rank {}: {}", host_.mesh_rank(message.peer), error));
      }
    }
  }

  void connect(std::vector<OutgoingMessages>& outgoing, std::vector<IncomingMessages>& incoming) {
    std::map<int, std::size_t> from;  // by peer: index of what it sends
    for (Message& message : messages_) {
      if (message.bytes == 0) continue;
      const int peer = host_.mesh_rank(message.peer);
      if (message.flag) {
        auto* const flag = static_cast<FlagWords*>(mappings_.map(peer, message.theirs.flag));
        if (message.side == Side::sender) {
          outgoing.push_back({std::move(*message.flag), flag});
        } else {
          from[message.peer] = incoming.size();
          incoming.push_back({std::move(*message.flag), flag, {}});
        }
      }
      if (message.side == Side::receiver) {
        incoming[from.at(message.peer)].copies.push_back(
            {mappings_.map(peer, message.theirs.data), message.destination, message.bytes});
      }
    }
  }

  // Agrees on success, so that no rank posts an exchange that a peer cannot.
  void agree_with_peers() {
    ShortText mine;
    mine.set(error_);
    std::vector<ShortText> theirs(peers_.size());
    std::vector<Send> sends;
    std::vector<Receive> receives;
    auto text = theirs.begin();
    for (const int peer : peers_) {
      sends.push_back({peer, &mine, sizeof(mine)});
      receives.push_back({peer, &*text++, sizeof(ShortText)});
    }
    exchange_on_host(sends, receives);
    if (!error_.empty()) throw AgreedFailure(error_);
    text = theirs.begin();
    for (const int peer : peers_) {
      if (const std::string error = (text++)->get(); !error.empty()) {
        // An error that came to the peer from a third rank names that rank already.
        throw AgreedFailure(error.starts_with("rank ")
                                ? error
                                : fmt::format("rank {}: {}", host_.mesh_rank(peer), error));
      }
    }
  }

  void exchange_on_host(const std::vector<Send>& sends, const std::vector<Receive>& receives) {
    HostStream stream("preparation", watchdog_, nullptr);
    host_.exchange(sends, receives, stream, label_);
    stream.synchronize();
  }

  [[nodiscard]] std::vector<MemoryCopy> own_copies(const std::vector<Send>& sends,
                                                   const std::vector<Receive>& receives) const {
    std::vector<MemoryCopy> copies;
    for_each_self_message(sends, receives, host_.rank(),
                          [&](const Send* send, const Receive* receive) {
                            if (send->bytes == 0) return;
                            copies.push_back({send->data, receive->data, send->bytes});
                          });
    return copies;
  }

  Group& host_;
  const Watchdog& watchdog_;
  std::string what_;
  ExchangeLabel label_;
  FlagBlock& flags_;
  SharedMemoryPool& memory_;
  PeerMappings& mappings_;
  std::vector<Message> messages_;
  std::set<int> peers_;
  std::string error_;
};

}  // namespace

std::unique_ptr<PeerExchange> shake_hands(Group& host, const Watchdog& watchdog,
                                          const std::vector<Send>& sends,
                                          const std::vector<Receive>& receives,
                                          const ExchangeLabel& label, FlagBlock& flags,
                                          SharedMemoryPool& memory, PeerMappings& mappings) {
  return Handshake(host, watchdog, label, flags, memory, mappings).run(sends, receives);
}

}  // namespace annulus::peer
