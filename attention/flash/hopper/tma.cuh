#pragma once

#include <cstdint>
#include <cuda.h>

#include "flash/hopper/barrier.cuh"

// Bulk tensor copies (TMA) from global to shared memory.

namespace annulus::hopper {

/// Hints to the L2 cache about the bytes of a copy (encodings of createpolicy).
enum class Cache : std::uint64_t {
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}

/// Copies one box of a tensor of rank 4 whose corner lies at (x0, x1, x2, x3), innermost first.
/// Elements outside the tensor arrive as zeros and count as bytes of the box all the same.
__device__ __forceinline__ void copy_box(void* target, const CUtensorMap* map, Barrier& barrier,
                                         Cache cache, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(target)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(barrier.address()), "r"(x0), "r"(x1), "r"(x2),
      "r"(x3), "l"(static_cast<std::uint64_t>(cache))
      : "memory");
}

/// Adds one box from shared memory to a tensor, element by element and atomically. What lies
/// outside the tensor is left out. Belongs to the thread's next bulk group.
__device__ __forceinline__ void add_box(const CUtensorMap* map, const void* from, int x0, int x1,
                                        int x2, int x3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

}  // namespace annulus::hopper
