#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

/// Adds x and y to a pair of elements in L2. Where bits must repeat, threads add to an element only
/// once or in an order that does not vary.
__device__ __forceinline__ void add_pair(const Gradient& to, std::int64_t at, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to.data + at), "f"(x),
               "f"(y)
               : "memory");
}

/// Adds a thread's part of a token's gradient, times `factor`. `sum` holds sums of a product for
/// two rows, of which row `h`, 0 or 1, is the token's.
template <int kSums>
__device__ __forceinline__ void add_sums(const Gradient& to, std::int32_t batch, std::int32_t token,
                                         std::int32_t head, const float (&sum)[kSums], int h,
                                         float factor) {
  const int dim = 2 * (static_cast<int>(threadIdx.x) % 4);
  const std::int64_t start =
      batch * to.strides.batch + token * to.strides.sequence + head * to.strides.head + dim;
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    if (8 * i + dim >= to.dim) continue;
    add_pair(to, start + 8 * i, factor * sum[4 * i + 2 * h], factor * sum[4 * i + 2 * h + 1]);
  }
}

}  // namespace annulus::flash::backward
