#pragma once

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::flash {

/// A tensor [batch, sequence, head, dim] of a half type as TMA sees it, in boxes of 64 dims and
/// `box_rows` positions.
[[nodiscard]] inline CUtensorMap tensor_map(const ConstTensorView& tensor, int box_rows) {
  constexpr std::int64_t kVectorBytes = 16;
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(tensor.size(dim)); };
  const auto stride = [&](int dim) {
    const auto bytes = tensor.stride(dim) * static_cast<std::int64_t>(size_of(tensor.dtype()));
    return static_cast<cuuint64_t>(tensor.size(dim) > 1 ? bytes : kVectorBytes);
  };
  const cuuint64_t sizes[] = {size(3), size(1), size(2), size(0)};
  const cuuint64_t strides[] = {stride(1), stride(2), stride(0)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  cuda::check_driver(cuda::driver_calls().tensor_map_encode_tiled(
                         &map,
                         tensor.dtype() == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                         4, const_cast<void*>(tensor.data()), sizes, strides, box, steps,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                     "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace annulus::flash
