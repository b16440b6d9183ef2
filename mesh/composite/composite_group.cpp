#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <utility>
#include <vector>

#include <annulus/core/cuda.hpp>
#include <annulus/mesh/composite_group.hpp>

#include "composite/message_split.hpp"
#include "composite/traits.hpp"
#include "device_group.hpp"
#include "self/self_messages.hpp"

namespace annulus {
namespace {

std::unique_ptr<Stream> make_side_stream(Place place, const Watchdog& watchdog) {
  constexpr const char* kName = "between nodes";
  if (place.is_host()) return HostDevice().make_stream(kName, watchdog, nullptr, true);
  return make_cuda_device(place.device)->make_stream(kName, watchdog, nullptr, true);
}

/// Runs `inside` on the given stream and, at the same time, `across` on a stream of the group;
/// either may be empty. Later work on the given stream starts after both.
class SideBySide {
 public:
  SideBySide(Place place, const Watchdog& watchdog) : side_(make_side_stream(place, watchdog)) {}

  void run(Stream& stream, const std::function<void(Stream&)>& inside,
           const std::function<void(Stream&)>& across) {
    if (!across) {
      if (inside) inside(stream);
      return;
    }
    if (!inside) return across(stream);
    side_->wait(stream.record());
    across(*side_);
    inside(stream);
    stream.wait(side_->record());
  }

 private:
  std::unique_ptr<Stream> side_;
};

class CompositeExchange final : public PreparedExchange {
 public:
  /// Either of the two may be null.
  CompositeExchange(SideBySide& streams, std::unique_ptr<PreparedExchange> inside,
                    std::unique_ptr<PreparedExchange> across)
      : streams_(streams), inside_(std::move(inside)), across_(std::move(across)) {}

  void offer(Stream& stream) override {
    for_each_part([&](PreparedExchange& part) { part.offer(stream); });
  }
  // Reclaims too, so that the whole exchange is two-sided. It does so after both parts: if devices
  // ran the parts one after the other, ranks with different orders would wait for each other.
  void take(Stream& stream) override {
    const auto taking = [](PreparedExchange* part) -> std::function<void(Stream&)> {
      if (part == nullptr) return {};
      return [part](Stream& on) { part->take(on); };
    };
    streams_.run(stream, taking(inside_.get()), taking(across_.get()));
    for_each_part([&](PreparedExchange& part) { part.reclaim(stream); });
  }

 private:
  template <class Body>
  void for_each_part(const Body& body) {
    if (inside_) body(*inside_);
    if (across_) body(*across_);
  }

  SideBySide& streams_;
  std::unique_ptr<PreparedExchange> inside_;
  std::unique_ptr<PreparedExchange> across_;
};

class CompositeGroup final : public DeviceGroup {
 public:
  CompositeGroup(Group& host, PeerReach reach, std::unique_ptr<Group> inside,
                 std::unique_ptr<Group> across, const Watchdog& watchdog)
      : DeviceGroup(host, inside->place()),
        reach_(std::move(reach)),
        inside_(std::move(inside)),
        across_(std::move(across)),
        streams_(place(), watchdog) {}

  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kCompositeTraits; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    const SplitMessages messages = split(sends, receives);
    const auto exchanging = [&](Group& group,
                                const Messages& part) -> std::function<void(Stream&)> {
      if (part.empty()) return {};
      return [&](Stream& on) { group.exchange(part.sends, part.receives, on, label); };
    };
    streams_.run(stream, exchanging(*inside_, messages.inside),
                 exchanging(*across_, messages.across));
  }
  [[nodiscard]] std::unique_ptr<PreparedExchange> prepare(std::vector<Send> sends,
                                                          std::vector<Receive> receives,
                                                          ExchangeLabel label) override {
    SplitMessages messages = split(sends, receives);
    const auto prepared = [&](Group& group, Messages& part) -> std::unique_ptr<PreparedExchange> {
      if (part.empty()) return nullptr;
      return group.prepare(std::move(part.sends), std::move(part.receives), label);
    };
    auto inside = prepared(*inside_, messages.inside);
    auto across = prepared(*across_, messages.across);
    return std::make_unique<CompositeExchange>(streams_, std::move(inside), std::move(across));
  }
  [[nodiscard]] MemoryPool& exchange_memory(MemoryPool& ordinary) override {
    return inside_->exchange_memory(across_->exchange_memory(ordinary));
  }
  void check() override {
    inside_->check();
    across_->check();
  }
  // Work of either group may wait for the other's, so both give up at the same time. Copies give up
  // first: NCCL frees memory when it gives up, which waits for work that waits for a copy.
  void give_up() noexcept override {
    constexpr std::chrono::milliseconds kHeadStart{500};
    try {
      std::promise<void> released;
      const std::future<void> is_released = released.get_future();
      const std::future<void> given_up = std::async(std::launch::async, [&] {
        (void)is_released.wait_for(kHeadStart);
        across_->give_up();
      });
      inside_->give_up();
      released.set_value();
      given_up.wait();
    } catch (const std::exception&) {  // no thread available
      inside_->give_up();
      across_->give_up();
    }
  }

 private:
  [[nodiscard]] SplitMessages split(std::span<const Send> sends,
                                    std::span<const Receive> receives) const {
    check_messages(sends, receives, rank(), size());
    return split_messages(sends, receives, rank(), reach_);
  }

  PeerReach reach_;
  std::unique_ptr<Group> inside_;
  std::unique_ptr<Group> across_;
  SideBySide streams_;
};

}  // namespace

std::unique_ptr<Group> make_composite_group(Group& host, PeerReach reach,
                                            std::unique_ptr<Group> inside,
                                            std::unique_ptr<Group> across,
                                            const Watchdog& watchdog) {
  return std::make_unique<CompositeGroup>(host, std::move(reach), std::move(inside),
                                          std::move(across), watchdog);
}

}  // namespace annulus
