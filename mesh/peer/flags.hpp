#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <utility>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus::peer {

/// Value of a flag that is up; down is 0. All bytes are equal so that a memset can raise flags.
inline constexpr std::uint32_t kRaised = 0x01010101;

class FlagBlock;

/// One flag of a block: down when taken, and it must be down when given back. Move-only.
class Flag {
 public:
  Flag() = default;
  Flag(FlagBlock* block, std::uint32_t* address) noexcept : block_(block), address_(address) {}
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
  [[nodiscard]] std::uint32_t* address() const noexcept { return address_; }

 private:
  FlagBlock* block_ = nullptr;
  std::uint32_t* address_ = nullptr;
};

/// The flags of a group in one piece of device memory.
class FlagBlock {
 public:
  /// Also tries whether the device can write and wait for flags in stream order; throws
  /// LibraryError if it cannot.
  FlagBlock(MemoryPool& pool, const Watchdog& watchdog);

  /// Throws LibraryError when all are taken.
  [[nodiscard]] Flag take();
  /// For use after a failure, when work that waits for a peer would block every call that frees
  /// memory, for ever. If the device does not finish its work soon, raises all flags repeatedly
  /// until it has, or some seconds have passed. The flags are unusable afterwards.
  void let_everybody_pass() noexcept;
  /// Throws LibraryError if the flags have become unusable.
  void check() const;

 private:
  friend class Flag;
  void raise_until_idle();
  void give_back(std::uint32_t* flag) noexcept { free_.push_back(flag); }

  Buffer memory_;
  CudaStream stream_;  // of its own, so that it never waits behind what waits for a flag
  std::vector<std::uint32_t*> free_;
  std::atomic<bool> useless_ = false;  // a watching thread may give the group up
};

}  // namespace annulus::peer
