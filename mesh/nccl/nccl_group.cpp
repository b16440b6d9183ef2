#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <nccl.h>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/gpu_binding.hpp>
#include <annulus/mesh/nccl_group.hpp>

#include "device_group.hpp"
#include "nccl/traits.hpp"
#include "topology/node_identity.hpp"

namespace annulus {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

void check_nccl(ncclResult_t code, const char* call) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  throw LibraryError(fmt::format("{}: {}", call, ncclGetErrorString(code)));
}

ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

// State shared by the communicators of a mesh. Once one has failed, none can be finalised normally.
struct Failure {
  std::atomic<bool> noted = false;
  // Time left for aborting all communicators, each of which may wait for a peer that hangs.
  std::chrono::duration<double> patience{5};
  std::mutex mutex;  // of `patience`
};

// Runs `what` on a separate thread for at most this long: NCCL may wait for a peer that hangs, and
// would delay the report of the failure.
template <class What>
void within(std::chrono::duration<double> patience, int device, What what) noexcept {
  try {
    auto done = std::make_shared<std::promise<void>>();
    const std::future<void> end = done->get_future();
    std::thread([device, what, done] {
      (void)cudaSetDevice(device);  // affects only this thread
      what();
      done->set_value();
    }).detach();
    (void)end.wait_for(patience);
  } catch (const std::exception&) {
    what();  // no thread available
  }
}

// Owns a communicator. Without failures, its destruction is collective, in the same order on every
// rank. A watching thread may abort it at any time.
class NcclCommunicator {
 public:
  NcclCommunicator(ncclComm_t raw, int device, Watchdog watchdog, std::shared_ptr<Failure> failure)
      : raw_(raw), device_(device), watchdog_(std::move(watchdog)), failure_(std::move(failure)) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() {
    // Peers may free what this rank still uses, so all ranks finalise together. Ranks that have
    // failed, or leave with an error, do not take part and are not waited for.
    if (!failure_->noted && std::uncaught_exceptions() <= exceptions_ && finalized()) {
      within(watchdog_.timeout(), device_, [raw = raw_] { (void)ncclCommDestroy(raw); });
    } else {
      abort();
    }
  }

  // Calls `use` with the communicator, which is not aborted meanwhile. Throws if it was aborted
  // earlier.
  template <class Use>
  void with(Use use) const {
    const std::scoped_lock lock(mutex_);
    if (raw_ == nullptr) {
      throw LibraryError("transport nccl: unusable, because an earlier exchange failed");
    }
    use(raw_);
  }
  // The state of the work so far. Throws if any of it has failed.
  [[nodiscard]] ncclResult_t state(const std::string& what) const {
    ncclResult_t state = ncclInProgress;
    with([&](ncclComm_t raw) {
      check_nccl(ncclCommGetAsyncError(raw, &state), "ncclCommGetAsyncError");
    });
    check_nccl(state, what.c_str());
    return state;
  }
  // A non-blocking communicator may accept work late.
  void settle(const std::string& what) const {
    watchdog_.wait(
        [&] { return state(what) != ncclInProgress; },
        [&] { return fmt::format("{}: waiting for the other ranks of the NCCL group", what); });
  }
  void abort() noexcept {
    failure_->noted = true;
    ncclComm_t raw = nullptr;
    {
      const std::scoped_lock lock(mutex_);
      raw = std::exchange(raw_, nullptr);
    }
    if (raw != nullptr) {
      using Clock = std::chrono::steady_clock;
      const std::scoped_lock lock(failure_->mutex);
      const Clock::time_point begin = Clock::now();
      within(failure_->patience, device_, [raw] { (void)ncclCommAbort(raw); });
      failure_->patience -=
          std::min<std::chrono::duration<double>>(Clock::now() - begin, failure_->patience);
    }
  }

 private:
  // Flushes posted work, which a non-blocking communicator does in the background.
  [[nodiscard]] bool finalized() const noexcept {
    try {
      const DeviceGuard guard(device_);
      with([](ncclComm_t raw) { check_nccl(ncclCommFinalize(raw), "ncclCommFinalize"); });
      settle("end of NCCL");
      return true;
    } catch (const std::exception&) {
      return false;  // the missing peer reports the error itself
    }
  }

  mutable std::mutex mutex_;  // of `raw_`
  ncclComm_t raw_;            // null: aborted
  int device_;
  Watchdog watchdog_;
  std::shared_ptr<Failure> failure_;
  int exceptions_ = std::uncaught_exceptions();
};

/// A group of NCCL calls. An error between them ends the group too, as an open group would swallow
/// all later calls of the thread.
class NcclCalls {
 public:
  NcclCalls() { check_nccl(ncclGroupStart(), "ncclGroupStart"); }
  ~NcclCalls() {
    if (open_) ncclGroupEnd();
  }
  NcclCalls(const NcclCalls&) = delete;
  NcclCalls& operator=(const NcclCalls&) = delete;
  void end() {
    open_ = false;
    check_nccl(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  bool open_ = true;
};

class NcclGroup final : public DeviceGroup {
 public:
  NcclGroup(Group& host, Place place, std::unique_ptr<NcclCommunicator> communicator)
      : DeviceGroup(host, place), communicator_(std::move(communicator)) {}

  [[nodiscard]] const TransportTraits& traits() const noexcept override { return kNcclTraits; }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives, Stream& stream,
                ExchangeLabel label) override {
    const DeviceGuard guard(place().device);
    auto* const raw = CudaStream::of(stream).raw();
    communicator_->with([&](ncclComm_t communicator) {
      NcclCalls calls;
      for (const Send& send : sends) {
        check_nccl(ncclSend(send.data, send.bytes, ncclInt8, send.peer, communicator, raw),
                   "ncclSend");
      }
      for (const Receive& receive : receives) {
        check_nccl(ncclRecv(receive.data, receive.bytes, ncclInt8, receive.peer, communicator, raw),
                   "ncclRecv");
      }
      calls.end();
    });
    communicator_->settle(label.step < 0
                              ? "posting " + label.what
                              : fmt::format("step {}: posting {}", label.step, label.what));
  }
  void give_up() noexcept override { communicator_->abort(); }
  void check() override {
    const DeviceGuard guard(place().device);
    (void)communicator_->state("NCCL");
  }

 private:
  std::unique_ptr<NcclCommunicator> communicator_;
};

// NCCL itself reports only "invalid usage", and only on some ranks. For NCCL, NCCL_HOSTID defines a
// host.
void check_devices_differ(Control& world, Place place) {
  const char* const host = std::getenv("NCCL_HOSTID");
  const auto shared =
      ranks_on_one_gpu(world, place.device, host != nullptr ? host : machine_identity());
  if (!shared) return;
  throw UnsupportedError(
      fmt::format("transport nccl: ranks {} and {} share a GPU, which NCCL does not support "
                  "(--transport peer --share-gpus does)",
                  shared->first, shared->second));
}

class StandardNcclGroups final : public NcclGroups {
 public:
  StandardNcclGroups(Control& world, Place place, Watchdog watchdog)
      : world_(world), place_(place), watchdog_(std::move(watchdog)) {
    check_devices_differ(world_, place_);
  }

  [[nodiscard]] std::unique_ptr<Group> make(Group& host) override {
    const std::string mine = collectively(world_, [&] {
      if (host.rank() != 0) return std::string();
      ncclUniqueId id{};
      check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
      return std::string(id.internal, sizeof(id.internal));
    });
    const std::string identity = host.control().broadcast(mine, "NCCL's identity");
    return collectively(world_, [&]() -> std::unique_ptr<Group> {
      ncclUniqueId id{};
      std::copy(identity.begin(), identity.end(), id.internal);
      const DeviceGuard guard(place_.device);
      ncclConfig_t config = non_blocking();
      ncclComm_t raw = nullptr;
      check_nccl(ncclCommInitRankConfig(&raw, host.size(), id, host.rank(), &config),
                 "ncclCommInitRankConfig");
      auto communicator =
          std::make_unique<NcclCommunicator>(raw, place_.device, watchdog_, failure_);
      communicator->settle("bringing up NCCL");
      return std::make_unique<NcclGroup>(host, place_, std::move(communicator));
    });
  }

 private:
  Control& world_;
  Place place_;
  Watchdog watchdog_;
  std::shared_ptr<Failure> failure_ = std::make_shared<Failure>();
};

}  // namespace

NcclVersions nccl_versions() {
  int loaded = 0;
  (void)ncclGetVersion(&loaded);
  return {version_text(NCCL_VERSION_CODE), version_text(loaded)};
}

std::unique_ptr<NcclGroups> make_nccl_groups(Control& world, Place place, Watchdog watchdog) {
  return std::make_unique<StandardNcclGroups>(world, place, std::move(watchdog));
}

}  // namespace annulus
