#include <cstddef>
#include <exception>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

#include "device_group.hpp"
#include "peer/flags.hpp"
#include "peer/handshake.hpp"
#include "peer/shared_memory.hpp"
#include "peer/sum_parts.hpp"

namespace annulus {
namespace {

class PeerCopyGroup final : public DeviceGroup {
 public:
  PeerCopyGroup(Group& host, Place place, Watchdog watchdog)
      : DeviceGroup(host, place),
        watchdog_(std::move(watchdog)),
        memory_(place.device),
        flags_(memory_, watchdog_) {}
  // As with communicators, ranks end their groups together: nobody frees what is mapped elsewhere.
  // Unless something failed, when the others may never come.
  ~PeerCopyGroup() override {
    pending_.clear();
    mappings_.clear();
    if (std::uncaught_exceptions() > exceptions_) return;
    try {
      host().barrier();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): who is missing will say why
    }
  }
  PeerCopyGroup(const PeerCopyGroup&) = delete;
  PeerCopyGroup& operator=(const PeerCopyGroup&) = delete;

  [[nodiscard]] std::string transport() const override { return "peer"; }
  [[nodiscard]] bool is_one_sided() const noexcept override { return true; }

  [[nodiscard]] std::unique_ptr<PreparedExchange> prepare(std::vector<Send> sends,
                                                          std::vector<Receive> receives,
                                                          ExchangeLabel label) override {
    return shake_hands(sends, receives, label);
  }
  [[nodiscard]] MemoryPool& exchange_memory(MemoryPool& /*ordinary*/) override { return memory_; }
  void check() override { flags_.check(); }
  void give_up() noexcept override { flags_.let_everybody_pass(); }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    keep(post_unprepared(sends, receives, stream, label), {}, stream);
  }
  void all_gather(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    keep(post_all_pairs(send, 0, receive, bytes, stream, "all-gather"), {}, stream);
  }
  void all_to_all(const void* send, void* receive, std::size_t bytes, Stream& stream) override {
    keep(post_all_pairs(send, bytes, receive, bytes, stream, "all-to-all"), {}, stream);
  }
  void reduce_scatter(const float* send, float* receive, std::size_t count,
                      Stream& stream) override {
    const std::size_t bytes = count * sizeof(float);
    Buffer parts = memory_.allocate(static_cast<std::size_t>(size()) * bytes);
    auto posted = post_all_pairs(send, bytes, parts.data(), bytes, stream, "reduce-scatter");
    peer::sum_parts(static_cast<const float*>(parts.data()), size(), count, receive,
                    CudaStream::of(stream).raw());
    keep(std::move(posted), std::move(parts), stream);
  }

 private:
  /// What an unprepared call needs until the device has done it.
  struct Pending {
    std::unique_ptr<PreparedExchange> exchange;
    Buffer scratch;
    std::shared_ptr<Event> done;
  };

  std::unique_ptr<peer::PeerExchange> shake_hands(const std::vector<Send>& sends,
                                                  const std::vector<Receive>& receives,
                                                  const ExchangeLabel& label) {
    return peer::shake_hands(host(), watchdog_, sends, receives, label, flags_, mappings_);
  }

  std::unique_ptr<PreparedExchange> post_unprepared(std::span<const Send> sends,
                                                    std::span<const Receive> receives,
                                                    Stream& stream, const ExchangeLabel& label) {
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
    return exchange;
  }

  // As in the MPI group: `send_stride` is 0 when all ranks get the same.
  std::unique_ptr<PreparedExchange> post_all_pairs(const void* send, std::size_t send_stride,
                                                   void* receive, std::size_t bytes, Stream& stream,
                                                   const char* what) {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    // Every rank begins with its right neighbour, so that not all pull from one at once.
    for (int i = 1; i <= size(); ++i) {
      const int to = (rank() + size() - i) % size();
      const int from = (rank() + i) % size();
      sends.push_back(
          {to, static_cast<const std::byte*>(send) + static_cast<std::size_t>(to) * send_stride,
           bytes});
      receives.push_back(
          {from, static_cast<std::byte*>(receive) + static_cast<std::size_t>(from) * bytes, bytes});
    }
    return post_unprepared(sends, receives, stream, {what, -1});
  }

  void keep(std::unique_ptr<PreparedExchange> exchange, Buffer scratch, Stream& stream) {
    pending_.push_back({std::move(exchange), std::move(scratch), stream.record()});
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
  return collectively(host, [&]() -> std::unique_ptr<Group> {
    return std::make_unique<PeerCopyGroup>(host, place, watchdog);
  });
}

}  // namespace annulus
