#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

/// How threads add to a gradient in memory. in_l2 does not wait for the old value, which suits
/// short work. by_load loads, waits once for a row of a sum, and stores, which is faster at the end
/// of long work.
enum class Adding { in_l2, by_load };

/// Adds x and y to a pair of elements. Sums repeat their bits, as threads add to an element only
/// once or in an order that does not vary.
template <Adding kAdding = Adding::in_l2>
__device__ __forceinline__ void add_pair(const Gradient& to, std::int64_t at, float x, float y) {
  if constexpr (kAdding == Adding::in_l2) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to.data + at), "f"(x),
                 "f"(y)
                 : "memory");
  } else {
    auto* const pair = reinterpret_cast<float2*>(to.data + at);
    const float2 before = __ldcg(pair);
    *pair = float2{x + before.x, y + before.y};
  }
}

/// Adds a thread's part of a token's gradient, times `factor`. `sum` holds sums of a product for
/// two rows, of which row `h`, 0 or 1, is the token's.
template <Adding kAdding = Adding::in_l2, int kSums>
__device__ __forceinline__ void add_sums(const Gradient& to, std::int32_t batch, std::int32_t token,
                                         std::int32_t head, const float (&sum)[kSums], int h,
                                         float factor) {
  const int dim = 2 * (static_cast<int>(threadIdx.x) % 4);
  const std::int64_t start =
      batch * to.strides.batch + token * to.strides.sequence + head * to.strides.head + dim;
  if constexpr (kAdding == Adding::by_load) {
    float2 before[kSums / 4];
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      if (8 * i + dim >= to.dim) continue;
      before[i] = __ldcg(reinterpret_cast<const float2*>(to.data + start + 8 * i));
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      if (8 * i + dim >= to.dim) continue;
      *reinterpret_cast<float2*>(to.data + start + 8 * i) =
          float2{fmaf(factor, sum[4 * i + 2 * h], before[i].x),
                 fmaf(factor, sum[4 * i + 2 * h + 1], before[i].y)};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      if (8 * i + dim >= to.dim) continue;
      add_pair<kAdding>(to, start + 8 * i, factor * sum[4 * i + 2 * h],
                        factor * sum[4 * i + 2 * h + 1]);
    }
  }
}

}  // namespace annulus::flash::backward
