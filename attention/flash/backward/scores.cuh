#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/warp_scores.cuh"

// Addresses of pairs in bias and dense mask. Rows and columns past the last ones read the entries
// of the last ones; their pairs have no weight.
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

/// Calls use(i, entry of score kFirst + i) for kCount scores of the thread, with their entries in a
/// tensor [b,n,t,key].
template <int kFirst, int kCount, class T, class Use>
__device__ __forceinline__ void for_entries(const Arguments& a, const WarpScores& of, T* entries,
                                            const std::int64_t (&strides)[4], const Use& use) {
  const std::int32_t column = of.column + of.lane / 4;
  std::int32_t row = of.row + 2 * kFirst + 2 * (of.lane % 4);
  entries += of.batch * strides[0] + of.head * strides[1] + min(row, a.rows - 1) * strides[2];
  T* of_keys[2] = {entries + key_at(a, column) * strides[3],
                   entries + key_at(a, column + 8) * strides[3]};
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      use(i + e, of_keys[0]);
      use(i + 2 + e, of_keys[1]);
      const int further = e == 0 ? 1 : 7;
      row += further;
      if (row >= a.rows) continue;
      of_keys[0] += further * strides[2];
      of_keys[1] += further * strides[2];
    }
  }
}

}  // namespace annulus::flash::backward
