#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include <annulus/core/handle.hpp>
#include <annulus/core/memory.hpp>

namespace annulus::peer {

/// An address in device memory, in a form that other processes can map.
struct SharedAddress {
  cudaIpcMemHandle_t allocation{};
  std::uint64_t offset = 0;
};

/// `address` may point anywhere into memory from cudaMalloc; throws LibraryError for other memory.
[[nodiscard]] SharedAddress share(const void* address);

/// Device memory that can be shared. Shared blocks are kept until the pool ends, since peers have
/// them mapped.
class SharedMemoryPool final : public MemoryPool {
 public:
  explicit SharedMemoryPool(int device) : MemoryPool(Place::cuda(device)) {}
  ~SharedMemoryPool() override;

  /// As share(), and marks the memory as mapped by peers. Also accepts memory outside the pool.
  [[nodiscard]] SharedAddress share(const void* address);

 protected:
  /// Little goes back to the system, so sizes come in coarse steps: an eighth of the next lower
  /// power of two, and at least the device's own granularity.
  [[nodiscard]] std::size_t block_bytes(std::size_t bytes) const noexcept override;
  void* system_allocate(std::size_t bytes) override;
  void system_free(void* data, std::size_t bytes) noexcept override;
  [[nodiscard]] bool may_free(const void* data) const noexcept override;
  [[nodiscard]] std::string system_state() const override;

 private:
  mutable std::mutex mutex_;
  std::set<const void*> shared_;  // where shared allocations begin
};

/// The allocations of peers that this process has mapped, each once, until the object ends.
class PeerMappings {
 public:
  /// For use by the CUDA device `device`.
  explicit PeerMappings(int device) : device_(device) {}
  /// The peer's address as mapped in this process. Maps the allocation on first use; throws
  /// LibraryError.
  [[nodiscard]] void* map(int peer, const SharedAddress& address);
  /// Unmaps all.
  void clear() { mapped_.clear(); }

 private:
  struct MappingTraits {
    using Raw = void*;
    static Raw null() noexcept { return nullptr; }
    static void release(Raw raw) noexcept { (void)cudaIpcCloseMemHandle(raw); }
  };
  int device_;
  std::map<std::pair<int, std::string>, Handle<MappingTraits>> mapped_;  // by peer and handle
};

}  // namespace annulus::peer
