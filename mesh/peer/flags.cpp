#include "peer/flags.hpp"

#include <chrono>
#include <thread>

#include <fmt/format.h>

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>

#include "peer/stream_operations.hpp"

namespace annulus::peer {
namespace {

constexpr std::size_t kFlags = 16384;
// Each flag in a memory sector of its own.
constexpr std::size_t kStrideBytes = 32;

}  // namespace

Flag::~Flag() {
  if (block_ != nullptr) block_->give_back(address_);
}

FlagBlock::FlagBlock(MemoryPool& pool, const Watchdog& watchdog)
    : memory_(pool.allocate(kFlags * kStrideBytes, "flags of transport peer")),
      stream_("flags", pool.place().device, watchdog, nullptr, true) {
  const DeviceGuard guard(pool.place().device);
  check_cuda(cudaMemsetAsync(memory_.data(), 0, memory_.bytes(), stream_.raw()), "cudaMemsetAsync");
  free_.reserve(kFlags);
  for (std::size_t i = kFlags; i-- > 0;) {
    free_.push_back(reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(memory_.data()) +
                                                     i * kStrideBytes));
  }
  StreamOperations trial(stream_.raw());
  trial.write(free_.back(), kRaised);
  trial.wait_and_lower(free_.back());
  trial.submit();
  stream_.synchronize();
}

Flag FlagBlock::take() {
  check();
  if (free_.empty()) {
    throw LibraryError(fmt::format(
        "more than {} messages in the prepared exchanges of a group of transport peer", kFlags));
  }
  std::uint32_t* const flag = free_.back();
  free_.pop_back();
  return {this, flag};
}

void FlagBlock::let_everybody_pass() noexcept {
  if (useless_) return;  // done before
  try {
    const DeviceGuard guard(memory_.place().device);
    raise_until_idle();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the device is lost, and nothing waits
  }
}

void FlagBlock::raise_until_idle() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kGrace{200};
  constexpr std::chrono::seconds kMost{5};
  CUcontext context = nullptr;
  cudaEvent_t raw = nullptr;
  if (cuda::driver_calls().ctx_get_current(&context) != CUDA_SUCCESS) return;
  if (cudaEventCreateWithFlags(&raw, cudaEventDisableTiming) != cudaSuccess) return;
  const Handle<CudaEventTraits> all_done(raw);
  if (cuda::driver_calls().ctx_record_event(context, raw) != CUDA_SUCCESS) return;
  const auto begin = Clock::now();
  while (cudaEventQuery(raw) == cudaErrorNotReady && Clock::now() - begin < kMost) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (Clock::now() - begin < kGrace) continue;
    useless_ = true;
    if (cudaMemsetAsync(memory_.data(), 1, memory_.bytes(), stream_.raw()) != cudaSuccess) return;
  }
}

void FlagBlock::check() const {
  if (useless_) throw LibraryError("transport peer: unusable after an exchange that failed");
}

}  // namespace annulus::peer
