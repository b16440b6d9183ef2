#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace annulus::flash::backward {

// A hidden pair has weight 0, but 0 · NaN is NaN. So tiles of which some pair is hidden are
// searched for special values. These are values that are not finite, and in bfloat16 also finite
// ones from 2^56 on, whose products could overflow. The sum of 256 products of smaller values is
// below 2^120.

/// True if one of this thread's share of some values is special.
template <class Element, int kThreads>
[[nodiscard]] __device__ __forceinline__ bool any_special(const Element* values, int count,
                                                          int thread) {
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  constexpr std::uint32_t kToSign = kHalf ? 0x04000400 : 0x24802480;  // from the first special one
  constexpr std::uint32_t kMagnitudes = 0x7FFF7FFF, kSigns = 0x80008000;
  const uint4* const vectors = reinterpret_cast<const uint4*>(values);
  std::uint32_t sums = 0;
#pragma unroll 1
  for (int i = thread; i < count / 8; i += kThreads) {
    const uint4 v = vectors[i];
    sums |= ((v.x & kMagnitudes) + kToSign) | ((v.y & kMagnitudes) + kToSign) |
            ((v.z & kMagnitudes) + kToSign) | ((v.w & kMagnitudes) + kToSign);
  }
  return (sums & kSigns) != 0;
}

/// The same for LSE and delta.
[[nodiscard]] __device__ __forceinline__ bool is_special(float x) {
  return !(fabsf(x) < 0x1p120F);
}

/// True if `mine` is true of one of kThreads threads, which all wait at named barrier `id`.
template <int kThreads>
[[nodiscard]] __device__ __forceinline__ bool any_of_threads(int id, bool mine) {
  std::uint32_t any = 0;
  asm volatile(
      "{\n.reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(mine)), "r"(id), "n"(kThreads)
      : "memory");
  return any != 0;
}

/// Entries `dim`, which is even, and dim + 1 of a row of a tile of kRows rows that TMA has
/// swizzled.
template <int kRows, class Element>
[[nodiscard]] __device__ __forceinline__ float2 swizzled_pair(const Element* tile, int row,
                                                              int dim) {
  const int at = dim / 64 * (kRows * 64) + row * 64 + ((dim % 64 / 8) ^ (row % 8)) * 8 + dim % 8;
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(tile + at));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(tile + at));
  }
}

}  // namespace annulus::flash::backward
