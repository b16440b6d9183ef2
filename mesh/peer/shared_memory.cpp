#include "peer/shared_memory.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>

#include <fmt/format.h>

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/cuda_memory.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>

namespace annulus::peer {

SharedAddress share(const void* address) {
  const auto raw = reinterpret_cast<CUdeviceptr>(address);
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  cuda::check_driver(cuda::driver_calls().mem_get_address_range(&base, &bytes, raw),
                     "cuMemGetAddressRange (is the buffer device memory?)");
  SharedAddress shared;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are integers
  auto* const start = reinterpret_cast<void*>(base);
  if (const cudaError_t code = cudaIpcGetMemHandle(&shared.allocation, start);
      code != cudaSuccess) {
    (void)cudaGetLastError();
    throw CudaError("cudaIpcGetMemHandle (is the buffer from cudaMalloc?)", code);
  }
  shared.offset = raw - base;
  return shared;
}

SharedMemoryPool::~SharedMemoryPool() {
  shared_.clear();
  release();
}

SharedAddress SharedMemoryPool::share(const void* address) {
  const SharedAddress shared = peer::share(address);
  const std::lock_guard lock(mutex_);
  shared_.insert(static_cast<const std::byte*>(address) - shared.offset);
  return shared;
}

bool SharedMemoryPool::may_free(const void* data) const noexcept {
  const std::lock_guard lock(mutex_);
  return !shared_.contains(data);
}

std::size_t SharedMemoryPool::block_bytes(std::size_t bytes) const noexcept {
  constexpr std::size_t kLeast = std::size_t{2} << 20;
  const std::size_t step = std::max(kLeast, std::bit_floor(std::max<std::size_t>(bytes, 1)) / 8);
  return (std::max<std::size_t>(bytes, 1) + step - 1) / step * step;
}

void* SharedMemoryPool::system_allocate(std::size_t bytes) {
  // Smaller allocations share a page of the driver, and a handle exposes the whole page.
  constexpr std::size_t kPage = std::size_t{2} << 20;
  const DeviceGuard guard(place().device);
  return cuda::allocate((bytes + kPage - 1) / kPage * kPage);
}

std::string SharedMemoryPool::system_state() const {
  return cuda::memory_state(place().device);
}

void SharedMemoryPool::system_free(void* data, std::size_t /*bytes*/) noexcept {
  (void)cudaFree(data);
}

void* PeerMappings::map(int peer, const SharedAddress& address) {
  const std::string handle(address.allocation.reserved, sizeof(address.allocation.reserved));
  Handle<MappingTraits>& mapping = mapped_[{peer, handle}];
  if (!mapping) {
    const DeviceGuard guard(device_);
    void* base = nullptr;
    const cudaError_t code =
        cudaIpcOpenMemHandle(&base, address.allocation, cudaIpcMemLazyEnablePeerAccess);
    if (code != cudaSuccess) {
      (void)cudaGetLastError();
      throw CudaError(fmt::format("cudaIpcOpenMemHandle of memory of rank {}", peer), code);
    }
    mapping.reset(base);
  }
  return static_cast<std::byte*>(mapping.get()) + address.offset;
}

}  // namespace annulus::peer
