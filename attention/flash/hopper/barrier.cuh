#pragma once

#include <cstdint>

// Barriers of a thread block on Hopper: mbarriers, which count arrivals and bytes, and the sixteen
// named barriers, which count threads.

namespace annulus::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// An mbarrier in shared memory. Its phases alternate between parity 0 and 1; a wait for the parity
/// of a phase returns once that phase is complete.
class Barrier {
 public:
  __device__ __forceinline__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  /// Arrives, and makes the phase wait for this many bytes of bulk copies too.
  __device__ __forceinline__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(std::uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait_again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra wait_over;\n"
        "bra wait_again;\n"
        "wait_over:\n"
        "}\n" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t address() const {
    return shared_address(&state_);
  }

 private:
  std::uint64_t state_;
};

/// Makes initialised mbarriers visible to bulk copies; a __syncthreads must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Waits until `threads` threads have arrived at named barrier `id`, this warp's among them.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Moves registers between warpgroups: every thread of the warpgroup has kCount from here on.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace annulus::hopper
