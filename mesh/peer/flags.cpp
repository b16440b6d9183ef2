#include "peer/flags.hpp"

#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>

namespace annulus::peer {
namespace {

// The number of flags allocated at once.
constexpr std::size_t kFlags = 4096;
// Each flag has its own memory sector.
constexpr std::size_t kStrideBytes = 32;

FlagWords* flag_of(const Buffer& memory, std::size_t index) {
  return reinterpret_cast<FlagWords*>(static_cast<std::byte*>(memory.data()) +
                                      index * kStrideBytes);
}

// True if all work of the current device ends within this time; false on an error.
bool is_idle_within(std::chrono::steady_clock::duration most) {
  using Clock = std::chrono::steady_clock;
  CUcontext context = nullptr;
  cudaEvent_t raw = nullptr;
  // A thread has a context from its first call of the runtime on, so the event comes first.
  if (cudaEventCreateWithFlags(&raw, cudaEventDisableTiming) != cudaSuccess) return false;
  const Handle<CudaEventTraits> all_done(raw);
  if (cuda::driver_calls().ctx_get_current(&context) != CUDA_SUCCESS) return false;
  if (cuda::driver_calls().ctx_record_event(context, raw) != CUDA_SUCCESS) return false;
  const auto begin = Clock::now();
  for (;;) {
    const cudaError_t state = cudaEventQuery(raw);
    if (state != cudaErrorNotReady) return state == cudaSuccess;
    if (Clock::now() - begin > most) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void raise(FlagWords* flag, CudaStream& stream) {
  stream.write_word(&flag->raised, 1);
}

void wait_and_lower(FlagWords* flag, CudaStream& stream) {
  stream.await_word(flag, 1);
  stream.write_word(&flag->raised, 0);
}

Flag::~Flag() {
  if (block_ != nullptr) block_->give_back(address_);
}

FlagBlock::FlagBlock(MemoryPool& pool, const Watchdog& watchdog)
    : pool_(pool), stream_("flags", pool.place().device, watchdog, nullptr, true) {
  const DeviceGuard guard(pool.place().device);
  const Flag trial = take();
  raise(trial.address(), stream_);
  wait_and_lower(trial.address(), stream_);
  stream_.synchronize();
}

Flag FlagBlock::take() {
  check();
  if (free_.empty()) add_flags();
  FlagWords* const flag = free_.back();
  free_.pop_back();
  return {this, flag};
}

// Waits until the new flags are lowered, since a peer may raise them at once.
void FlagBlock::add_flags() {
  const DeviceGuard guard(pool_.place().device);
  Buffer added = pool_.allocate(kFlags * kStrideBytes, "flags of transport peer");
  check_cuda(cudaMemsetAsync(added.data(), 0, added.bytes(), stream_.raw()), "cudaMemsetAsync");
  stream_.synchronize();
  const std::lock_guard lock(mutex_);
  free_.reserve((memory_.size() + 1) * kFlags);
  memory_.push_back(std::move(added));
  for (std::size_t i = kFlags; i-- > 0;) free_.push_back(flag_of(memory_.back(), i));
}

void FlagBlock::abandon() noexcept {
  constexpr std::chrono::milliseconds kGrace{200};
  constexpr std::chrono::seconds kLongest{5};
  if (unusable_) return;  // done before
  try {
    const DeviceGuard guard(pool_.place().device);
    if (is_idle_within(kGrace)) return;
    unusable_ = true;
    const std::lock_guard lock(mutex_);
    // By stream operations, since kernels that wait may leave no room for another kernel.
    for (const Buffer& memory : memory_) {
      for (std::size_t i = 0; i < kFlags; ++i) {
        stream_.write_word(&flag_of(memory, i)->abandoned, 1);
      }
    }
    stream_.flush();
    (void)is_idle_within(kLongest);
  } catch (const Error&) {
    unusable_ = true;  // the device takes no more work, so it cannot be released
  }
}

void FlagBlock::check() const {
  if (unusable_) throw LibraryError("transport peer: unusable, because an earlier exchange failed");
}

}  // namespace annulus::peer
