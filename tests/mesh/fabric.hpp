#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "control/messenger.hpp"
#include "control/short_messages.hpp"
#include "control/tree_control.hpp"

namespace annulus::test {

/// Ranks of a job in one thread, with the messages between them, all of them counted. Each rank
/// runs on a stack of its own until it waits for a message.
class Fabric {
 public:
  struct Counts {
    std::size_t messages = 0;  ///< sent and received
    std::size_t bytes = 0;     ///< sent
    std::set<int> peers;
  };

  explicit Fabric(int size) : ranks_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      at(rank).control = std::make_unique<TreeControl>(std::make_unique<Texts>(*this, rank));
    }
  }

  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] Control& control(int rank) { return *at(rank).control; }
  [[nodiscard]] std::unique_ptr<ShortMessages> short_messages(int rank) {
    return std::make_unique<Short>(*this, rank);
  }

  /// Runs `body` on every rank, to its end. Throws what a rank throws, and if ranks wait for ever.
  void run(const std::function<void(int rank)>& body) {
    constexpr std::size_t kStack = std::size_t{128} << 10;
    body_ = &body;
    finished_ = 0;
    for (int rank = 0; rank < size(); ++rank) {
      Rank& one = at(rank);
      one.stack = std::make_unique_for_overwrite<char[]>(kStack);
      getcontext(&one.context);
      one.context.uc_stack.ss_sp = one.stack.get();
      one.context.uc_stack.ss_size = kStack;
      one.context.uc_link = &scheduler_;
      running_ = this;
      makecontext(&one.context, &Fabric::enter, 0);
      ready_.push_back(rank);
    }
    while (!ready_.empty()) {
      current_ = ready_.front();
      ready_.pop_front();
      now_ += 1e-3 / size();
      swapcontext(&scheduler_, &at(current_).context);
      if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    }
    if (finished_ < size()) throw std::logic_error("ranks wait for each other");
  }

  void count(int from, int to, std::size_t bytes) {
    Counts& sender = at(from).counts;
    ++sender.messages;
    sender.bytes += bytes;
    sender.peers.insert(to);
    Counts& receiver = at(to).counts;
    ++receiver.messages;
    receiver.peers.insert(from);
  }
  void forget_counts() {
    for (Rank& rank : ranks_) rank.counts = {};
  }
  [[nodiscard]] std::size_t most_messages() const {
    return most([](const Counts& counts) { return counts.messages; });
  }
  [[nodiscard]] std::size_t most_peers() const {
    return most([](const Counts& counts) { return counts.peers.size(); });
  }
  [[nodiscard]] std::size_t all_bytes() const {
    std::size_t sum = 0;
    for (const Rank& rank : ranks_) sum += rank.counts.bytes;
    return sum;
  }
  [[nodiscard]] std::size_t all_messages() const {
    std::size_t sum = 0;
    for (const Rank& rank : ranks_) sum += rank.counts.messages;
    return sum / 2;
  }

 private:
  using Inbox = std::deque<std::pair<int, std::string>>;
  struct Rank {
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    std::unique_ptr<TreeControl> control;
    std::map<int, std::deque<std::string>> texts;  // by sender
    std::map<ShortMessages::Kind, Inbox> short_messages;
    bool waits = false;
    Counts counts;
  };

  class Texts final : public Messenger {
   public:
    Texts(Fabric& fabric, int rank) : fabric_(fabric), rank_(rank) {}
    [[nodiscard]] int rank() const noexcept override { return rank_; }
    [[nodiscard]] int size() const noexcept override { return fabric_.size(); }
    [[nodiscard]] int mesh_rank(int rank) const override { return rank; }
    [[nodiscard]] std::string name_of(int rank) const override {
      return "rank " + std::to_string(rank);
    }
    void send(std::string_view /*what*/, std::span<const int> to,
              const std::string& text) override {
      for (const int peer : to) {
        fabric_.count(rank_, peer, text.size());
        Rank& receiver = fabric_.at(peer);
        receiver.texts[rank_].push_back(text);
        if (std::exchange(receiver.waits, false)) fabric_.ready_.push_back(peer);
      }
    }
    [[nodiscard]] std::string receive(const Call& /*call*/, int from) override {
      std::deque<std::string>& texts = fabric_.at(rank_).texts[from];
      while (texts.empty()) {
        fabric_.at(rank_).waits = true;
        fabric_.leave();
      }
      std::string text = std::move(texts.front());
      texts.pop_front();
      return text;
    }
    [[nodiscard]] Computing computing(double /*timeouts*/) const override {
      return {nullptr, Watchdog::Seconds(0)};
    }
    [[noreturn]] void abort(int /*exit_code*/) noexcept override { std::terminate(); }

   private:
    Fabric& fabric_;
    int rank_;
  };

  class Short final : public ShortMessages {
   public:
    Short(Fabric& fabric, int rank) : fabric_(fabric), rank_(rank) {}
    void post(int to, Kind kind, const std::string& text) override {
      fabric_.count(rank_, to, text.size());
      fabric_.at(to).short_messages[kind].emplace_back(rank_, text);
    }
    [[nodiscard]] bool take(Kind kind, int& from, std::string& text) override {
      Inbox& inbox = fabric_.at(rank_).short_messages[kind];
      if (inbox.empty()) return false;
      std::tie(from, text) = std::move(inbox.front());
      inbox.pop_front();
      return true;
    }
    [[nodiscard]] double now() const override { return fabric_.now_; }
    void pause() override {
      fabric_.ready_.push_back(rank_);
      fabric_.leave();
    }

   private:
    Fabric& fabric_;
    int rank_;
  };

  [[nodiscard]] Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  void leave() { swapcontext(&at(current_).context, &scheduler_); }
  static void enter() {
    Fabric& fabric = *running_;
    try {
      (*fabric.body_)(fabric.current_);
    } catch (...) {
      if (!fabric.failure_) fabric.failure_ = std::current_exception();
    }
    ++fabric.finished_;
  }
  template <class Number>
  [[nodiscard]] std::size_t most(const Number& number) const {
    std::size_t most = 0;
    for (const Rank& rank : ranks_) most = std::max(most, number(rank.counts));
    return most;
  }

  static inline Fabric* running_ = nullptr;
  std::vector<Rank> ranks_;
  ucontext_t scheduler_{};
  const std::function<void(int rank)>* body_ = nullptr;
  std::deque<int> ready_;
  std::exception_ptr failure_;
  int current_ = 0;
  int finished_ = 0;
  double now_ = 0;
};

}  // namespace annulus::test
