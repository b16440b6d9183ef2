#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "cuda/dropout.cuh"
#include "flash/backward/arguments.hpp"

// Dropout of pairs. One call of Philox decides eight keys of a row, among 32 keys that begin at a
// multiple of 32, and a thread has the scores of only two of the eight. So two warps, which
// together have 32 neighbouring keys, share the draws: each thread draws all 32 keys of one row.
namespace annulus::flash::backward {

/// A row, and the first of 32 columns.
struct RowOfColumns {
  std::int32_t batch, head, row, column;
};

/// Bit k: key 32 · group + k of the row at `position` drops.
template <int kUnroll>
[[nodiscard]] __device__ __forceinline__ std::uint32_t draw_32(const Arguments& a,
                                                               const RowOfColumns& of,
                                                               std::uint32_t position,
                                                               std::uint32_t group) {
  const uint2 key = cuda::key_of(a.dropout);
  std::uint32_t dropped = 0;
#pragma unroll kUnroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    const uint4 drawn = cuda::philox(
        {4 * group + i, position, a.dropout.first_head + static_cast<std::uint32_t>(of.head),
         a.dropout.first_batch + static_cast<std::uint32_t>(of.batch)},
        key.x, key.y);
    const std::uint32_t words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
    std::uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if ((words[w] & 0xffffU) < a.dropout.threshold) bits |= 1U << (8 * w);
      if (words[w] >> 16U < a.dropout.threshold) bits |= 2U << (8 * w);
    }
    dropped |= bits << (2 * i);
  }
  return dropped;
}

/// Bit k: column of.column + k of the row drops. `neighbours`: the columns are neighbours in
/// position. kUnroll calls of Philox run at a time; registers limit it.
template <int kUnroll>
[[nodiscard]] __device__ __forceinline__ std::uint32_t draw_row(const Arguments& a,
                                                                const RowOfColumns& of,
                                                                bool neighbours) {
  const std::int32_t position = __ldg(a.mask.row_positions + of.row);
  const auto row = static_cast<std::uint32_t>(position);
  std::uint32_t dropped = 0;
  if (neighbours) {
    const auto key = static_cast<std::uint32_t>(__ldg(a.mask.column_positions + of.column));
    dropped = draw_32<kUnroll>(a, of, row, key / 32);
    if (key % 32 != 0) {
      dropped = __funnelshift_r(dropped, draw_32<kUnroll>(a, of, row, key / 32 + 1), key);
    }
    return dropped;
  }
#pragma unroll 1
  for (int k = 0; k < 32; ++k) {
    const bool drops = cuda::drops(a.dropout, static_cast<std::uint32_t>(of.batch),
                                   static_cast<std::uint32_t>(of.head), position,
                                   a.mask.column_positions[of.column + k]);
    if (drops) dropped |= 1U << k;
  }
  return dropped;
}

/// Bit i % 32 of word i / 32: score i drops.
template <int kScores>
using DroppedBits = std::uint32_t[kScores / 32];

/// Drops pairs from dO·Vᵀ. They are multiplied by 0, not set to 0, so that non-finite values still
/// count.
template <int kScores>
__device__ __forceinline__ void drop(float (&grads)[kScores], const DroppedBits<kScores>& dropped) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if ((dropped[i / 32] >> i % 32 & 1) != 0) grads[i] *= 0;
  }
}
/// The same for packed weights.
template <class Element, int kPacked>
__device__ __forceinline__ void drop(std::uint32_t (&weights)[kPacked],
                                     const DroppedBits<2 * kPacked>& dropped) {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  constexpr std::uint32_t kOnes = std::is_same_v<Element, __half> ? 0x3c003c00 : 0x3f803f80;
#pragma unroll
  for (int i = 0; i < kPacked; ++i) {
    std::uint32_t kept = kOnes;
    const std::uint32_t two = dropped[i / 16] >> 2 * i % 32;
    if ((two & 1) != 0) kept &= 0xffff0000;
    if ((two & 2) != 0) kept &= 0x0000ffff;
    const Pair product =
        __hmul2(reinterpret_cast<const Pair&>(weights[i]), reinterpret_cast<const Pair&>(kept));
    weights[i] = reinterpret_cast<const std::uint32_t&>(product);
  }
}

}  // namespace annulus::flash::backward
