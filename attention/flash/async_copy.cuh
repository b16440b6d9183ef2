#pragma once

#include <cstdint>

namespace annulus::flash {

/// Copies 16 bytes from global to shared memory, past the registers; zeros if nothing is there.
__device__ __forceinline__ void async_copy(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
/// Closes the group of the copies since the last call. It may be empty.
__device__ __forceinline__ void async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until all of this thread's groups but the last kPending have arrived.
template <int kPending>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace annulus::flash
