#pragma once

#include "flash/item.cuh"

// Addresses of an item's rows in a result.
namespace annulus::flash {

/// A row of the block, of one query head of one batch.
struct ResultRow {
  std::int32_t batch;
  std::int32_t head;
  std::int32_t row;
};
/// Row `row` of an item.
[[nodiscard]] __device__ __forceinline__ ResultRow result_row(const Item& item, std::int32_t row) {
  return {item.batch, item.head, item.tile.first_row + row};
}

[[nodiscard]] __device__ __forceinline__ std::int64_t output_offset(const Result& result,
                                                                    const ResultRow& at) {
  const Strides& strides = result.output_strides;
  return at.batch * strides.batch + at.head * strides.head + at.row * strides.sequence;
}
[[nodiscard]] __device__ __forceinline__ std::int64_t lse_offset(const Result& result,
                                                                 const ResultRow& at) {
  return at.batch * result.lse_batch_stride + at.head * result.lse_head_stride +
         at.row * result.lse_row_stride;
}
[[nodiscard]] __device__ __forceinline__ double load_lse(const Result& result,
                                                         const ResultRow& row) {
  const std::int64_t at = lse_offset(result, row);
  return result.wide_lse ? static_cast<const double*>(result.lse)[at]
                         : static_cast<const float*>(result.lse)[at];
}
__device__ __forceinline__ void store_lse(const Result& result, const ResultRow& row, double lse) {
  const std::int64_t at = lse_offset(result, row);
  if (result.wide_lse) {
    static_cast<double*>(result.lse)[at] = lse;
  } else {
    static_cast<float*>(result.lse)[at] = static_cast<float>(lse);
  }
}

}  // namespace annulus::flash
