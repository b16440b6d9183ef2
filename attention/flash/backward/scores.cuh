#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"

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

}  // namespace annulus::flash::backward
