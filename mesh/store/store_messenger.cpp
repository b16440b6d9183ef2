#include "store/store_messenger.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>

#include "control/bytes_of.hpp"
#include "control/describe_wait.hpp"

namespace annulus {
namespace {

constexpr Watchdog::Seconds kPatience{2};
// The limit of one request to the store for a message. Requests get longer as a wait goes on;
// between them, the wait checks signals and the heartbeats of other ranks.
constexpr double kLongestAsk = 0.02;

double longer(double ask) {
  return std::min(ask + kLongestAsk / 64, kLongestAsk);
}

std::string name_of_rank(int rank) {
  return fmt::format("rank {}", rank);
}

}  // namespace

std::string StoreRanks::name_of(int peer) const {
  return name_of_rank(member(peer));
}

std::string StoreQueue::key_of(int from, int to, std::uint64_t number) const {
  return fmt::format("{}{}/{}>{}/{}", ranks_->prefix, kind_, from, to, number);
}

void StoreQueue::put(int to, const std::string& message) {
  ranks_->store->set(key_of(ranks_->rank, to, sent_[to]++), message);
}

bool StoreQueue::has_room(int to) const {
  // The store is asked only once per kAhead / 2 messages.
  constexpr std::uint64_t kHalf = KeyValueStore::kAhead / 2;
  const auto found = sent_.find(to);
  if (found == sent_.end() || found->second % kHalf != 0) return true;
  return !ranks_->store->get(key_of(ranks_->rank, to, found->second - kHalf), 0);
}

std::optional<std::string> StoreQueue::take(int from, double seconds) {
  const std::string key = key_of(from, ranks_->rank, received_[from]);
  auto message = ranks_->store->get(key, seconds);
  if (message) {
    ranks_->store->remove(key);
    ++received_[from];
  }
  return message;
}

StoreMessenger::StoreMessenger(std::shared_ptr<const StoreRanks> ranks, Watchdog watchdog)
    : ranks_(std::move(ranks)), watchdog_(std::move(watchdog)), queue_(ranks_, "text") {}

// The first message carries the length of the text; the rest follows in pieces.
void StoreMessenger::send(std::string_view what, std::span<const int> to, const std::string& text) {
  std::string first;
  append(first, std::uint64_t{text.size()});
  const std::size_t room = KeyValueStore::kMaximumBytes - first.size();
  first.append(text, 0, room);
  for (const int peer : to) {
    put(what, peer, first);
    for (std::size_t at = room; at < text.size(); at += KeyValueStore::kMaximumBytes) {
      put(what, peer, text.substr(at, KeyValueStore::kMaximumBytes));
    }
  }
}

std::string StoreMessenger::receive(const Call& call, int from) {
  std::string text = take(call, from);
  const auto length = value_at<std::uint64_t>(text, 0);
  text.erase(0, sizeof length);
  while (text.size() < length) {
    text += take({call.what, fmt::format("give {} more", human_bytes(length - text.size())), false},
                 from);
  }
  return text;
}

void StoreMessenger::put(std::string_view what, int to, const std::string& message) {
  double pause = 0;
  wait({what, fmt::format("take {}", human_bytes(message.size())), false}, to, [&] {
    if (!queue_.has_room(to)) {
      // The store has answered with a whole message.
      std::this_thread::sleep_for(Watchdog::Seconds(pause = longer(pause)));
      return false;
    }
    queue_.put(to, message);
    return true;
  });
}

std::string StoreMessenger::take(const Call& call, int from) {
  std::optional<std::string> message;
  double ask = 0;
  wait(call, from, [&] {
    message = queue_.take(from, ask);
    ask = longer(ask);
    return message.has_value();
  });
  return std::move(*message);
}

void StoreMessenger::wait(const Call& call, int peer, const std::function<bool()>& done) {
  const int awaited = ranks_->member(peer);
  ranks_->board->wait_for(awaited);
  bool described = false;
  const auto describe = [&] {
    std::string text = describe_wait(call, peer);
    described = true;
    return text;
  };
  try {
    watchdog_.wait(
        [&] {
          ranks_->board->beat(Heartbeats::State::waiting);
          return done();
        },
        describe, [awaited] { return std::vector{awaited}; });
  } catch (const TimeoutError& error) {
    if (described) throw;
    // The store hangs, and cannot say who is missing.
    throw TimeoutError(fmt::format("{} ({})", error.what(),
                                   annulus::describe_wait(call, awaited, awaited, name_of_rank)));
  }
  ranks_->board->wait_for(-1);
}

std::string StoreMessenger::describe_wait(const Call& call, int peer) {
  const double patience = std::min(kPatience, watchdog_.timeout()).count();
  return annulus::describe_wait(call, ranks_->member(peer),
                                ranks_->board->absent(ranks_->member(peer), patience),
                                name_of_rank);
}

}  // namespace annulus
