#pragma once

#include <cuda_runtime_api.h>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

/// Queries and keys of a tile of the float32 kernels.
inline constexpr int kFloat32Tile = 64;

/// The operands of a float32 call, [batch, sequence, head, dim].
struct Float32Operands {
  RowTensor query, key, value, grad_output;
};

/// launch_backward() for float32; `dim` is 64 or 128.
[[nodiscard]] cudaError_t launch_float32_backward(const Arguments& arguments,
                                                  const Float32Operands& operands, int dim,
                                                  cudaStream_t stream);

/// Enqueues the kernels of the wanted gradients, one for dK and dV and one for dQ, for head
/// dimensions up to kDims, 64 or 128. Their results repeat bit for bit. Lists and soft caps are
/// run-time arguments; bias, dense mask and dropout are not supported. Each size is compiled by
/// itself, from kernel.cu.in.
template <int kDims>
[[nodiscard]] cudaError_t launch_float32(const Arguments& arguments,
                                         const Float32Operands& operands, cudaStream_t stream);

}  // namespace annulus::flash::backward
