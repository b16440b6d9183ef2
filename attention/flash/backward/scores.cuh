#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/warp_scores.cuh"

// Bias and dense mask of a warp's scores. Rows and columns past the last ones read what the last
// ones read; their pairs have no weight.
namespace annulus::flash::backward {

/// The key of a column in a bias or mask.
[[nodiscard]] __device__ __forceinline__ std::int64_t key_at(const Arguments& a,
                                                             std::int32_t column) {
  column = min(column, a.columns - 1);
  return a.scores.key_of(column, a.mask.column_positions[column]);
}

/// The offset of a pair in a tensor [b,n,t,key].
[[nodiscard]] __device__ __forceinline__ std::int64_t offset_at(const Arguments& a,
                                                                const std::int64_t (&strides)[4],
                                                                std::int32_t batch,
                                                                std::int32_t head, std::int32_t row,
                                                                std::int32_t column) {
  return batch * strides[0] + head * strides[1] + min(row, a.rows - 1) * strides[2] +
         key_at(a, column) * strides[3];
}

/// Calls use(i, offset of score i) for all scores of the thread.
template <int kScores, class Use>
__device__ __forceinline__ void for_offsets(const Arguments& a, const WarpScores& of,
                                            const std::int64_t (&strides)[4], const Use& use) {
  const std::int64_t first = of.batch * strides[0] + of.head * strides[1];
  const std::int32_t column = of.column + of.lane / 4;
  const std::int64_t keys[2] = {first + key_at(a, column) * strides[3],
                                first + key_at(a, column + 8) * strides[3]};
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::int32_t row = of.row + 8 * i + 2 * (of.lane % 4) + e;
      const std::int64_t offset = min(row, a.rows - 1) * strides[2];
      use(4 * i + e, keys[0] + offset);
      use(4 * i + 2 + e, keys[1] + offset);
    }
  }
}

/// Bit i: byte i is not 0.
[[nodiscard]] __device__ __forceinline__ std::uint32_t set_bytes(std::uint32_t word) {
  const std::uint32_t set = (((word & 0x7f7f7f7fU) + 0x7f7f7f7fU) | word) >> 7U & 0x01010101U;
  return set * 0x01020408U >> 24U & 15U;
}

/// Sets bit i of word n if the dense mask hides score 32n + i. By all threads of a warp: each reads
/// the 16 keys of some rows, and all find theirs in shared memory. `neighbours`: see
/// draw_dropout().
template <int kWords>
__device__ __forceinline__ void hide_by_mask(std::uint32_t (&hidden)[kWords], const Arguments& a,
                                             const WarpScores& of, bool neighbours) {
  auto* const shown_of_rows = reinterpret_cast<std::uint16_t*>(of.own + 128 * kWords);
  const cuda::ScoreArgument<std::uint8_t>& mask = a.scores.mask;
  const bool in_vectors =
      (neighbours || a.scores.by_column) && mask.strides[3] == 1 && of.column + 16 <= a.columns;
#pragma unroll 1
  for (int r = of.lane; r < 64 * kWords; r += 32) {
    const std::uint8_t* const row = mask.row(of.batch, of.head, min(of.row + r, a.rows - 1));
    const std::uint8_t* const first = row + key_at(a, of.column) * mask.strides[3];
    std::uint32_t shown = 0;
    if (in_vectors && reinterpret_cast<std::uintptr_t>(first) % 16 == 0) {
      const uint4 keys = __ldg(reinterpret_cast<const uint4*>(first));
      shown = set_bytes(keys.x) | set_bytes(keys.y) << 4U | set_bytes(keys.z) << 8U |
              set_bytes(keys.w) << 12U;
    } else {
#pragma unroll 4
      for (int k = 0; k < 16; ++k) {
        if (__ldg(row + key_at(a, of.column + k) * mask.strides[3]) != 0) shown |= 1U << k;
      }
    }
    shown_of_rows[r] = static_cast<std::uint16_t>(shown);
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t two_rows = *reinterpret_cast<const std::uint32_t*>(
          shown_of_rows + 64 * n + 8 * i + 2 * (of.lane % 4));
      // In bits 0, 8, 16 and 24: scores 4i, 4i + 2, 4i + 1 and 4i + 3.
      const std::uint32_t four = ~two_rows >> of.lane / 4 & 0x01010101U;
      hidden[n] |= ((four | four >> 6U | four >> 15U | four >> 21U) & 15U) << (4 * i);
    }
  }
}

}  // namespace annulus::flash::backward
