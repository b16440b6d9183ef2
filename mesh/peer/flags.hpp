#pragma once

#include <atomic>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <mutex>
#include <utility>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus::peer {

/// A flag in device memory. One rank raises it, another waits for it and lowers it, both by stream
/// operations on the low word. Waits compare both words as a 64-bit number with 1, so a nonzero
/// high word, set when the group has failed, lets all waits pass for ever.
///
/// The low word is 0 or 1, not a call number: operands of stream operations are fixed in recorded
/// CUDA graphs, callers launch their graphs without our code, and stream operations cannot count.
/// Since the waiting rank lowers the flag, it serves posts and replays alike.
struct FlagWords {
  std::uint32_t raised;
  std::uint32_t abandoned;
};

/// Once everything before it in the stream is visible to all devices.
void raise(FlagWords* flag, CudaStream& stream);
/// The stream waits until the flag is up or abandoned, then lowers it.
void wait_and_lower(FlagWords* flag, CudaStream& stream);

class FlagBlock;

/// One flag of a block. It is lowered when taken, and must be lowered when returned. Move-only.
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

/// The flags of a group, in device memory that is allocated as flags are taken.
class FlagBlock {
 public:
  /// Tests that the device can write and wait for flags in stream order. Throws LibraryError if it
  /// cannot.
  FlagBlock(MemoryPool& pool, const Watchdog& watchdog);

  /// Throws LibraryError if there is no memory for another flag.
  [[nodiscard]] Flag take();
  /// For use after a failure of the group, when work that waits for a peer would block every call
  /// that frees memory for ever. If the device does not finish its work soon, abandons all flags:
  /// present and later waits pass, and the flags are unusable. Released copies access memory that
  /// stays mapped.
  void abandon() noexcept;
  /// Throws LibraryError if the flags have become unusable.
  void check() const;

 private:
  friend class Flag;
  void add_flags();
  void give_back(FlagWords* flag) noexcept { free_.push_back(flag); }

  MemoryPool& pool_;
  CudaStream stream_;  // of its own, so that it never waits behind what waits for a flag
  std::mutex mutex_;   // of memory_, since a watching thread may give the group up
  std::vector<Buffer> memory_;
  std::vector<FlagWords*> free_;  // with room for all
  std::atomic<bool> unusable_ = false;
};

}  // namespace annulus::peer
