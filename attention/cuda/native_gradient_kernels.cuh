#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include <annulus/core/dtype.hpp>

#include "cuda/native_block.hpp"

namespace annulus::cuda {

/// A gradient that a launch adds to; strides in elements.
struct NativeGradient {
  float* data;              // null: not wanted
  std::int64_t strides[3];  // b, then t and n, or s and k
};

/// One launch of the native kernels' backward pass.
struct NativeGradientArguments : NativeBlock {
  std::int64_t columns;  ///< columns of the launch, from column_range[0].first on
  const void* grad_output;
  std::int64_t grad_output_strides[3];  // b, t, n
  const float* lse;
  std::int64_t lse_strides[3];  // b, n, t
  const float* delta;
  std::int64_t delta_strides[3];  // likewise
  NativeGradient grad_query, grad_key, grad_value;
  float* grad_bias;                   // null: not wanted
  std::int64_t grad_bias_strides[4];  // b, n, t, key; 0 where it is broadcast
};

/// Adds the gradients that are wanted, each entry in a fixed order of terms. Ordered by the stream.
cudaError_t launch_native_gradients(const NativeGradientArguments& arguments, DType dtype,
                                    cudaStream_t stream);

}  // namespace annulus::cuda
