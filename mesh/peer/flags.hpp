#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <mutex>
#include <utility>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus::peer {

/// A flag in device memory. One rank raises and another one waits and lowers, both by stream
/// operations on the low word. Waits look at both words and pass when their 64-bit number is at
/// least 1, so a high word that is not 0 lets all waits pass for ever: the group has failed.
///
/// The low word is 0 or 1, not the number of the call: recorded CUDA graphs have the operands of
/// stream operations baked in, a caller launches his graphs without us, and stream operations
/// cannot count. A flag that is lowered by the one that waits serves posts and replays alike.
struct FlagWords {
  std::uint32_t raised;
  std::uint32_t abandoned;
};

/// Once everything before it in the stream is visible to all devices.
void raise(FlagWords* flag, CudaStream& stream);
/// The stream waits until the flag is up or abandoned, then lowers it.
void wait_and_lower(FlagWords* flag, CudaStream& stream);

class FlagBlock;

/// One flag of a block: down when taken, and it must be down when given back. Move-only.
class Flag {
 public:
  Flag() = default;
  Flag(FlagBlock* block, FlagWords* address) noexcept : block_(block), address_(address) {}
  Flag(Flag&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)), address_(other.address_) {}
  Flag& operator=(Flag&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(address_, other.address_);
    return *this;
  }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;
  ~Flag();

  /// In device memory.
  [[nodiscard]] FlagWords* address() const noexcept { return address_; }

 private:
  FlagBlock* block_ = nullptr;
  FlagWords* address_ = nullptr;
};

/// The flags of a group, in device memory that is taken when they are.
class FlagBlock {
 public:
  /// Also tries whether the device can write and wait for flags in stream order; throws
  /// LibraryError if it cannot.
  FlagBlock(MemoryPool& pool, const Watchdog& watchdog);

  /// Throws LibraryError without memory for another one.
  [[nodiscard]] Flag take();
  /// For use after a failure of the group, when work that waits for a peer would block every call
  /// that frees memory, for ever. If the device does not finish its work soon, abandons all flags:
  /// what waits for them now or later goes on, and the flags are unusable. Copies that go on read
  /// and write memory that stays mapped.
  void abandon() noexcept;
  /// Throws LibraryError if the flags have become unusable.
  void check() const;

 private:
  friend class Flag;
  void add_flags();
  void give_back(FlagWords* flag) noexcept { free_.push_back(flag); }

  MemoryPool& pool_;
  CudaStream stream_;  // of its own, so that it never waits behind what waits for a flag
  std::mutex mutex_;  // of memory_, since a watching thread may give the group up
  std::vector<Buffer> memory_;
  std::vector<FlagWords*> free_;        // with room for all
  std::atomic<bool> unusable_ = false;
};

}  // namespace annulus::peer
