#pragma once

#include "flash/item.cuh"

// Where the rows of an item lie in a result.
namespace annulus::flash {

[[nodiscard]] __device__ __forceinline__ std::int64_t output_offset(const Result& result,
                                                                    const Item& item,
                                                                    std::int32_t row) {
  const Strides& strides = result.output_strides;
  return item.batch * strides.batch + item.head * strides.head +
         (item.tile.first_row + row) * strides.sequence;
}
[[nodiscard]] __device__ __forceinline__ std::int64_t lse_offset(const Result& result,
                                                                 const Item& item,
                                                                 std::int32_t row) {
  return item.batch * result.lse_batch_stride + item.head * result.lse_head_stride +
         (item.tile.first_row + row) * result.lse_row_stride;
}
[[nodiscard]] __device__ __forceinline__ double load_lse(const Result& result, const Item& item,
                                                         std::int32_t row) {
  const std::int64_t at = lse_offset(result, item, row);
  return result.wide_lse ? static_cast<const double*>(result.lse)[at]
                         : static_cast<const float*>(result.lse)[at];
}
__device__ __forceinline__ void store_lse(const Result& result, const Item& item, std::int32_t row,
                                          double lse) {
  const std::int64_t at = lse_offset(result, item, row);
  if (result.wide_lse) {
    static_cast<double*>(result.lse)[at] = lse;
  } else {
    static_cast<float*>(result.lse)[at] = static_cast<float>(lse);
  }
}

}  // namespace annulus::flash
