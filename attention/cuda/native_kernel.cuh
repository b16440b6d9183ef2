#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include <annulus/core/dtype.hpp>

#include "cuda/native_block.hpp"

namespace annulus::cuda {

/// One launch of the native kernel: every (batch, head, row) of the block against its columns.
struct NativeArguments : NativeBlock {
  float* output;
  void* lse;       // float32 or float64
  bool wide_lse;   // float64
  float* maximum;  // null: not wanted
  // Strides in elements.
  std::int64_t output_strides[3];   // b, t, n
  std::int64_t lse_strides[3];      // b, n, t
  std::int64_t maximum_strides[3];  // likewise
  bool accumulate;                  // go on from what output, lse and maximum hold
};

/// Ordered by the stream. Shared memory: (head_dim + value_dim) floats per row.
cudaError_t launch_native(const NativeArguments& arguments, DType dtype, cudaStream_t stream);

}  // namespace annulus::cuda
