#include <exception>
#include <list>
#include <utility>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

#include "device_group.hpp"
#include "peer/flags.hpp"
#include "peer/handshake.hpp"
#include "peer/shared_memory.hpp"
#include "peer/traits.hpp"

namespace annulus {
namespace {

class PeerCopyGroup final : public DeviceGroup {
 public:
  PeerCopyGroup(Group& host, Place place, Watchdog watchdog)
      : DeviceGroup(host, place),
        watchdog_(std::move(watchdog)),
        memory_(place.device),
        flags_(memory_, watchdog_),
        mappings_(place.device) {}
  // As with communicators, ranks end their groups together, so that no rank frees memory that is
  // mapped elsewhere. After a failure they do not, since the others may never come, and device work
  // that waits for them would block freeing.
  ~PeerCopyGroup() override {
    const bool failing = std::uncaught_exceptions() > exceptions_;
    if (failing) flags_.abandon();
    pending_.clear();
    mappings_.clear();
    if (failing) return;
    try {
      control().barrier("end of transport peer");
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the missing rank reports why
    }
  }
  PeerCopyGroup(const PeerCopyGroup&) = delete;
  PeerCopyGroup& operator=(const PeerCopyGroup&) = delete;

  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kPeerTraits; }

  [[nodiscard]] std::unique_ptr<PreparedExchange> prepare(std::vector<Send> sends,
                                                          std::vector<Receive> receives,
                                                          ExchangeLabel label) override {
    return shake_hands(sends, receives, label);
  }
  [[nodiscard]] MemoryPool& exchange_memory(MemoryPool& /*ordinary*/) override { return memory_; }
  void check() override { flags_.check(); }
  void give_up() noexcept override { flags_.abandon(); }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(CudaStream::of(stream).raw(), &capturing),
               "cudaStreamIsCapturing");
    if (capturing != cudaStreamCaptureStatusNone) {
      throw InternalError(label.what +
                          ": an exchange of transport peer must be prepared to be captured");
    }
    std::erase_if(pending_, [](const Pending& pending) { return pending.done->is_complete(); });
    auto exchange =
        shake_hands({sends.begin(), sends.end()}, {receives.begin(), receives.end()}, label);
    exchange->post(stream);
    pending_.push_back({std::move(exchange), stream.record()});
  }

 private:
  /// The exchange of an unprepared call, kept until the device has finished it.
  struct Pending {
    std::unique_ptr<PreparedExchange> exchange;
    std::shared_ptr<Event> done;
  };

  std::unique_ptr<peer::PeerExchange> shake_hands(const std::vector<Send>& sends,
                                                  const std::vector<Receive>& receives,
                                                  const ExchangeLabel& label) {
    const DeviceGuard guard(place().device);
    return peer::shake_hands(host(), watchdog_, sends, receives, label, flags_, memory_, mappings_);
  }

  Watchdog watchdog_;
  peer::SharedMemoryPool memory_;
  peer::FlagBlock flags_;
  peer::PeerMappings mappings_;
  std::list<Pending> pending_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

std::unique_ptr<Group> make_peer_copy_group(Group& host, Place place, const Watchdog& watchdog) {
  return collectively(host.control(), [&]() -> std::unique_ptr<Group> {
    return std::make_unique<PeerCopyGroup>(host, place, watchdog);
  });
}

}  // namespace annulus
