#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/core/place.hpp>

namespace annulus {

class MemoryPool;

/// A move-only piece of a pool. Its destructor returns it to the pool, which must outlive it.
class Buffer {
 public:
  Buffer() = default;
  /// `block` is its size, of which `bytes` were requested.
  Buffer(MemoryPool* pool, void* data, std::size_t bytes, std::size_t block) noexcept
      : pool_(pool), data_(data), bytes_(bytes), block_(block) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] Place place() const noexcept;

 private:
  void swap(Buffer& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(block_, other.block_);
  }
  MemoryPool* pool_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t block_ = 0;
};

struct MemoryStatistics {
  std::size_t in_use = 0;          ///< bytes handed out now
  std::size_t peak_in_use = 0;     ///< the most handed out at once so far
  std::size_t reserved = 0;        ///< bytes held from the system, free ones included
  std::uint64_t system_calls = 0;  ///< number of requests to the system
};

/// Hands out memory of one place and keeps returned memory for later requests, so that a repeated
/// call allocates nothing. A request gets the smallest free block that fits and is at most a
/// quarter larger. If the system has no memory left, the pool returns its free blocks and asks
/// again. Safe to use from several threads.
class MemoryPool {
 public:
  /// Every buffer starts at a multiple of this many bytes.
  static constexpr std::size_t kAlignment = 256;

  explicit MemoryPool(Place place) : place_(place) {}
  virtual ~MemoryPool() = default;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// `what` names the memory in the LibraryError that is thrown if there is none.
  [[nodiscard]] Buffer allocate(std::size_t bytes, std::string_view what = {});
  [[nodiscard]] Place place() const noexcept { return place_; }
  [[nodiscard]] MemoryStatistics statistics() const;
  /// Resets the peak to the present use.
  void reset_peak();
  /// Returns free blocks to the system, if may_free() allows.
  void trim() { release(); }

 protected:
  /// The bytes to take from the system for a request of `bytes`: at least `bytes`, and a multiple
  /// of kAlignment. Requests with equal results can use the same block, one after the other.
  [[nodiscard]] virtual std::size_t block_bytes(std::size_t bytes) const noexcept;
  /// Called with a result of block_bytes(). Null if there is no memory; throws for other errors.
  virtual void* system_allocate(std::size_t bytes) = 0;
  virtual void system_free(void* data, std::size_t bytes) noexcept = 0;
  /// True if a free block may go back to the system before the pool ends. Called with the pool's
  /// lock held.
  [[nodiscard]] virtual bool may_free(const void* /*data*/) const noexcept { return true; }
  /// "3.2 GiB of 139.8 GiB are free": for the error when there is no memory; may be empty.
  [[nodiscard]] virtual std::string system_state() const { return {}; }
  /// Does what trim() does, for the destructors of derived pools.
  void release() noexcept;

 private:
  friend class Buffer;
  void give_back(void* data, std::size_t block) noexcept;
  /// The lock must be held.
  [[nodiscard]] std::pair<void*, std::size_t> take_free(std::size_t block) noexcept;
  void release_locked() noexcept;

  const Place place_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;  // by size of the block
  MemoryStatistics statistics_;
};

/// Ordinary host memory.
class HostMemoryPool final : public MemoryPool {
 public:
  HostMemoryPool() : MemoryPool(Place::host()) {}
  ~HostMemoryPool() override { release(); }

 protected:
  void* system_allocate(std::size_t bytes) override;
  void system_free(void* data, std::size_t bytes) noexcept override;
};

}  // namespace annulus
