#pragma once

#include <cstdint>

#include "cuda/dropout.cuh"
#include "flash/backward/arguments.hpp"
#include "flash/backward/pair_bits.cuh"
#include "flash/backward/warp_scores.cuh"
#include "flash/hopper/barrier.cuh"

// Dropout of pairs. One call of Philox decides eight keys of a row, among 32 keys that begin at a
// multiple of 32, and a thread has the scores of only two of the eight. So two warps, which
// together have 32 neighbouring keys, share the draws: each thread draws all 32 keys of one row.
namespace annulus::flash::backward {

/// Bit k: key 32 · group + k of a row drops.
__device__ __forceinline__ std::uint32_t draw_32(const Arguments& a, const WarpScores& of,
                                                 std::uint32_t row, std::uint32_t group) {
  const uint2 key = cuda::key_of(a.dropout);
  std::uint32_t dropped = 0;
#pragma unroll 1
  for (std::uint32_t i = 0; i < 4; ++i) {
    const uint4 drawn = cuda::philox(
        {4 * group + i, row, a.dropout.first_head + static_cast<std::uint32_t>(of.head),
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

/// The same for the 32 columns from `column` on, which need not be neighbours in position.
__device__ __forceinline__ std::uint32_t draw_each(const Arguments& a, const WarpScores& of,
                                                   std::int32_t row, std::int32_t column) {
  std::uint32_t dropped = 0;
#pragma unroll 1
  for (int k = 0; k < 32; ++k) {
    const bool drops =
        cuda::drops(a.dropout, static_cast<std::uint32_t>(of.batch),
                    static_cast<std::uint32_t>(of.head), row, a.mask.column_positions[column + k]);
    if (drops) dropped |= 1U << k;
  }
  return dropped;
}

/// Bit i of word n: score 32n + i drops. Called by all threads of the two warps, which meet at
/// named barrier `id`. `neighbours`: the keys of the tile are neighbours in position.
template <int kWords>
__device__ __forceinline__ void draw_dropout(std::uint32_t (&dropped)[kWords], const Arguments& a,
                                             const WarpScores& of, bool neighbours, int id) {
  const int odd = of.warp % 2;
  const std::int32_t column = of.column - 16 * odd;
  auto* const even_keys = reinterpret_cast<std::uint16_t*>(odd == 0 ? of.own : of.neighbour);
  auto* const odd_keys = reinterpret_cast<std::uint16_t*>(odd == 0 ? of.neighbour : of.own);
#pragma unroll 1
  for (int r = 32 * odd + of.lane; r < 64 * kWords; r += 64) {
    const std::int32_t row = __ldg(a.mask.row_positions + of.row + r);
    std::uint32_t bits = 0;
    if (neighbours) {
      const auto key = static_cast<std::uint32_t>(__ldg(a.mask.column_positions + column));
      bits = draw_32(a, of, static_cast<std::uint32_t>(row), key / 32);
      if (key % 32 != 0) {
        const std::uint32_t next = draw_32(a, of, static_cast<std::uint32_t>(row), key / 32 + 1);
        bits = __funnelshift_r(bits, next, key);
      }
    } else {
      bits = draw_each(a, of, row, column);
    }
    even_keys[r] = static_cast<std::uint16_t>(bits);
    odd_keys[r] = static_cast<std::uint16_t>(bits >> 16U);
  }
  hopper::named_sync(id, 64);
  gather_bits(dropped, reinterpret_cast<const std::uint16_t*>(of.own), of.lane);
}

}  // namespace annulus::flash::backward
