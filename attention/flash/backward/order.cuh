#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/hopper/barrier.cuh"

// The order in which key tiles add to a query tile's dQ, where the bits must not depend on which
// block comes first. They add in the order of their blocks' indices. Blocks take their indices from
// a counter as they start. So each waits only for blocks that have started, whatever the order of
// scheduling.
namespace annulus::flash::backward {

/// The index of this block's work.
[[nodiscard]] __device__ __forceinline__ std::int32_t work_index(const Arguments& a) {
  return a.turns != nullptr ? atomicAdd(a.next_index, 1) : static_cast<std::int32_t>(blockIdx.x);
}

/// 1 + the last key tile that has added to the dQ of a query tile, or 0.
class Turn {
 public:
  __device__ __forceinline__ explicit Turn(std::int32_t* last) : last_(last) {}

  __device__ __forceinline__ void wait(std::int32_t before) const {
    std::int32_t last = 0;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(last) : "l"(last_) : "memory");
    } while (last != before);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  /// After the bulk reductions of this thread.
  __device__ __forceinline__ void pass(std::int32_t key_tile) const {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(last_), "r"(key_tile + 1) : "memory");
  }

 private:
  std::int32_t* last_;
};

}  // namespace annulus::flash::backward
