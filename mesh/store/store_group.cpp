#include "store/store_group.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

#include "control/tree_control.hpp"
#include "self/self_messages.hpp"

namespace annulus {
namespace {

constexpr TransportTraits kTraits{.name = "store"};

/// Short messages of one exchange.
class StoreExchange final : public HostOperation {
 public:
  StoreExchange(const StoreRanks& ranks, StoreQueue& queue, std::vector<Send> sends,
                std::vector<Receive> receives, ExchangeLabel label)
      : ranks_(ranks),
        queue_(queue),
        sends_(std::move(sends)),
        receives_(std::move(receives)),
        label_(std::move(label)) {}

  void start() override {
    copy_self_messages(sends_, receives_, ranks_.rank);
    for (const Send& send : sends_) {
      if (send.peer == ranks_.rank) continue;
      // Some stores cannot hold an empty value.
      std::string message = "=";
      if (send.bytes > 0) message.append(static_cast<const char*>(send.data), send.bytes);
      queue_.put(send.peer, message);
    }
    std::erase_if(receives_, [&](const Receive& one) { return one.peer == ranks_.rank; });
  }
  bool test() override {
    // Polls get rarer, since a poll costs the store's process more than this process.
    using Clock = std::chrono::steady_clock;
    const auto now = Clock::now();
    if (now < due_) return false;
    if (begin_ == Clock::time_point()) begin_ = now;
    due_ = now + std::min<Clock::duration>((now - begin_) / 4, std::chrono::milliseconds(10));
    // Messages of a rank arrive in order: if one is missing, so are its later ones.
    std::vector<int> waits;
    for (Receive& receive : receives_) {
      if (receive.peer < 0 || std::ranges::find(waits, receive.peer) != waits.end()) continue;
      const auto message = queue_.take(receive.peer, 0);
      if (message) {
        take(receive, message->substr(1));
      } else {
        waits.push_back(receive.peer);
      }
    }
    std::erase_if(receives_, [](const Receive& one) { return one.peer < 0; });
    return receives_.empty();
  }
  [[nodiscard]] std::uint64_t pieces_finished() const override { return finished_; }
  [[nodiscard]] std::string describe() const override {
    std::string text = "waiting for";
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      text += fmt::format("{} {} of {} from {}", i == 0 ? "" : ",", human_bytes(receives_[i].bytes),
                          label_.what, ranks_.name_of(receives_[i].peer));
    }
    return label_.step < 0 ? text : fmt::format("step {}: {}", label_.step, text);
  }
  [[nodiscard]] std::vector<int> peers() const override {
    std::vector<int> awaited;
    for (const Receive& receive : receives_) awaited.push_back(ranks_.member(receive.peer));
    return awaited;
  }
  [[nodiscard]] TraceLabel label() const override {
    return {TraceCategory::transfer, label_.what, label_.step};
  }

 private:
  void take(Receive& receive, const std::string& bytes) {
    if (bytes.size() != receive.bytes) {
      throw LibraryError(fmt::format("{}: {} sends {} bytes, expected {}", label_.what,
                                     ranks_.name_of(receive.peer), bytes.size(), receive.bytes));
    }
    if (!bytes.empty()) std::memcpy(receive.data, bytes.data(), bytes.size());
    receive.peer = -1;
    ++finished_;
  }

  const StoreRanks& ranks_;
  StoreQueue& queue_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;  // outstanding
  ExchangeLabel label_;
  std::uint64_t finished_ = 0;
  std::chrono::steady_clock::time_point begin_{};
  std::chrono::steady_clock::time_point due_{};
};

class StoreGroup final : public Group {
 public:
  StoreGroup(std::shared_ptr<const StoreRanks> ranks, Watchdog watchdog)
      : Group(std::make_shared<TreeControl>(
            std::make_unique<StoreMessenger>(ranks, std::move(watchdog)))),
        ranks_(std::move(ranks)),
        queue_(ranks_, "data") {}

  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kTraits; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    check_messages(sends, receives, rank(), size());
    const auto check_length = [&](const auto& message) {
      if (message.peer == rank() || message.bytes < KeyValueStore::kMaximumBytes) return;
      throw UnsupportedError(fmt::format("{} of {} between rank {} and rank {}: {}",
                                         human_bytes(message.bytes), label.what, mesh_rank(rank()),
                                         mesh_rank(message.peer), store_obstacle()));
    };
    std::ranges::for_each(sends, check_length);
    std::ranges::for_each(receives, check_length);
    HostStream::of(stream).submit(std::make_unique<StoreExchange>(
        *ranks_, queue_, std::vector<Send>(sends.begin(), sends.end()),
        std::vector<Receive>(receives.begin(), receives.end()), std::move(label)));
  }

 private:
  std::shared_ptr<const StoreRanks> ranks_;
  StoreQueue queue_;
};

}  // namespace

std::unique_ptr<Group> make_store_group(std::shared_ptr<const StoreRanks> ranks,
                                        Watchdog watchdog) {
  return std::make_unique<StoreGroup>(std::move(ranks), std::move(watchdog));
}

std::string store_obstacle() {
  return "a key-value store connects the ranks, and data between CPUs needs MPI: start them with "
         "mpirun, or give each rank a GPU";
}

}  // namespace annulus
