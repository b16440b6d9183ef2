#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

// Messages that their senders have offered and their receivers have not taken yet.
namespace annulus::ring::simulation {

class Offers {
 public:
  /// Identifies the messages that one rank sends to another in the group along `axes`. They are
  /// received in the order in which they are sent. Ranks are below 2^24, `axes` below 2^16.
  [[nodiscard]] static std::uint64_t route(std::uint32_t axes, std::uint32_t from,
                                           std::uint32_t to) {
    constexpr unsigned kRankBits = 24;
    return (std::uint64_t{axes} << (2 * kRankBits)) | (std::uint64_t{from} << kRankBits) | to;
  }

  /// Adds a message of the sender's exchange. Exchanges are offered in order.
  void add(std::uint64_t route, std::uint32_t exchange) {
    Queue& queue = queues_[route];
    Offer& last = queue.later.empty() ? queue.first : queue.later.back();
    if (last.messages == 0 || last.exchange == exchange) {
      last = {exchange, last.messages + 1};
    } else {
      queue.later.push_back({exchange, 1});
    }
  }

  /// Takes the next message of a route and returns the sender's exchange. Returns nothing if no
  /// message is offered.
  [[nodiscard]] std::optional<std::uint32_t> take(std::uint64_t route) {
    const auto found = queues_.find(route);
    if (found == queues_.end()) return std::nullopt;
    auto& [first, later] = found->second;
    const std::uint32_t exchange = first.exchange;
    if (--first.messages > 0) return exchange;
    if (later.empty()) {
      queues_.erase(found);
    } else {
      first = later.front();
      later.erase(later.begin());
    }
    return exchange;
  }

 private:
  // Messages of one exchange on one route.
  struct Offer {
    std::uint32_t exchange = 0;
    std::uint32_t messages = 0;
  };
  // The offers of a route, in order. There is seldom more than one.
  struct Queue {
    Offer first;
    std::vector<Offer> later;
  };
  std::unordered_map<std::uint64_t, Queue> queues_;
};

}  // namespace annulus::ring::simulation
