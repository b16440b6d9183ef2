#pragma once

#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::flash {

[[nodiscard]] inline CUtensorMapDataType tensor_map_type(DType dtype) {
  if (dtype == DType::boolean) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (dtype == DType::float32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/// A tensor [batch, sequence, head, dim] of a half type, float32 or boolean as TMA sees it, in boxes
/// of `box_rows` positions and 128 bytes: 64, 32 or 128 dims.
[[nodiscard]] inline CUtensorMap tensor_map(const ConstTensorView& tensor, int box_rows) {
  constexpr std::size_t kBoxBytes = 128;
  constexpr std::int64_t kVectorBytes = 16;
  const auto size = [&](int dim) { return static_cast<cuuint64_t>(tensor.size(dim)); };
  const auto stride = [&](int dim) {
    const auto bytes = tensor.stride(dim) * static_cast<std::int64_t>(size_of(tensor.dtype()));
    return static_cast<cuuint64_t>(tensor.size(dim) > 1 ? bytes : kVectorBytes);
  };
  const cuuint64_t sizes[] = {size(3), size(1), size(2), size(0)};
  const cuuint64_t strides[] = {stride(1), stride(2), stride(0)};
  const auto box_dims = static_cast<cuuint32_t>(kBoxBytes / size_of(tensor.dtype()));
  const cuuint32_t box[] = {box_dims, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  cuda::check_driver(
      cuda::driver_calls().tensor_map_encode_tiled(
          &map, tensor_map_type(tensor.dtype()), 4, const_cast<void*>(tensor.data()), sizes,
          strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace annulus::flash
