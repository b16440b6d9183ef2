#pragma once

#include <cstdint>

#include "cuda/dropout.cuh"
#include "flash/backward/arguments.hpp"
#include "flash/backward/warp_scores.cuh"
#include "flash/hopper/barrier.cuh"

// Which pairs drop. A thread's scores have two of the eight keys that a call of Philox decides. The
// four threads that have all of them hold the same queries: two of this warp, and two of its
// neighbour, which has the 16 keys beside. Each calls for a quarter of the queries and writes what
// the others ask for into their memory.
namespace annulus::flash::backward {

/// Both warps' shares for 64 queries, of which `rows` are the positions, where their keys are
/// neighbours in position, from a multiple of 32 on, which is `first_key`.
__device__ __forceinline__ void draw_64(const Arguments& a, const WarpScores& of,
                                        const std::int32_t* rows, std::int32_t first_key,
                                        int first_byte) {
  const int half = of.lane / 4 % 2, odd_warp = of.warp % 2;
  const int part = 2 * odd_warp + half;  // of the queries
  const auto column_word = static_cast<std::uint32_t>(first_key / 32 * 4 + of.lane / 8);
  const uint2 key = cuda::key_of(a.dropout);
  // By warp: those of even keys, and 16 bits further of odd ones.
  std::uint32_t dropped[2] = {0, 0};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int2 positions =
        __ldg(reinterpret_cast<const int2*>(rows + 8 * (2 * part + i) + 2 * (of.lane % 4)));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint4 drawn =
          cuda::philox({column_word, static_cast<std::uint32_t>(e == 0 ? positions.x : positions.y),
                        a.dropout.first_head + static_cast<std::uint32_t>(of.head),
                        a.dropout.first_batch + static_cast<std::uint32_t>(of.batch)},
                       key.x, key.y);
      const std::uint32_t words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int bit = 4 * i + 2 * (w % 2) + e;
        if ((words[w] & 0xffffU) < a.dropout.threshold) dropped[w / 2] |= 1U << bit;
        if (words[w] >> 16U < a.dropout.threshold) dropped[w / 2] |= 0x10000U << bit;
      }
    }
  }
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    unsigned char* const to = (w == odd_warp ? of.own : of.neighbour) + first_byte + part;
    to[(of.lane & ~4) * 4] = static_cast<unsigned char>(dropped[w]);
    to[(of.lane | 4) * 4] = static_cast<unsigned char>(dropped[w] >> 16U);
  }
}

/// A thread's own share for 64 queries, wherever rows and columns lie.
__device__ __forceinline__ std::uint32_t draw_each(const Arguments& a, const WarpScores& of,
                                                   const std::int32_t* rows) {
  std::uint32_t dropped = 0;
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const std::int32_t row = rows[i / 4 * 8 + 2 * (of.lane % 4) + i % 2];
    const std::int32_t key = a.mask.column_positions[of.column + of.lane / 4 + i / 2 % 2 * 8];
    const bool drops = cuda::drops(a.dropout, static_cast<std::uint32_t>(of.batch),
                                   static_cast<std::uint32_t>(of.head), row, key);
    if (drops) dropped |= 1U << i;
  }
  return dropped;
}

/// Draws for 64 · kWords queries, by all threads of the two warps, which meet at named barrier
/// `id`. Bit i of a thread's word n, which dropped_word() reads: score 32n + i drops. `neighbours`:
/// the keys of the tile are neighbours in position, from a multiple of 32 on.
template <int kWords>
__device__ __forceinline__ void draw_dropout(const Arguments& a, const WarpScores& of,
                                             bool neighbours, int id) {
  const std::int32_t* const rows = a.mask.row_positions + of.row;
  if (neighbours) {
    const std::int32_t first_key = a.mask.column_positions[of.column - of.warp % 2 * 16];
#pragma unroll 1
    for (int n = 0; n < kWords; ++n) draw_64(a, of, rows + 64 * n, first_key, 128 * n);
    hopper::named_sync(id, 64);
  } else {
#pragma unroll 1
    for (int n = 0; n < kWords; ++n) {
      reinterpret_cast<std::uint32_t*>(of.own)[32 * n + of.lane] = draw_each(a, of, rows + 64 * n);
    }
  }
}
[[nodiscard]] __device__ __forceinline__ std::uint32_t dropped_word(const unsigned char* own, int n,
                                                                    int lane) {
  return reinterpret_cast<const std::uint32_t*>(own)[32 * n + lane];
}

}  // namespace annulus::flash::backward
