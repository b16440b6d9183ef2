#pragma once

#include <cuda_runtime_api.h>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

inline constexpr int kTileKeys = 128;
/// Rows of dQ that are added at a time.
inline constexpr int kSumRows = 64;
/// Rows of a query tile.
[[nodiscard]] constexpr int tile_queries(int dim) {
  return dim == 64 ? 128 : 64;
}

/// Enqueues the main kernel. Each is compiled by itself, from kernel.cu.in.
template <int kDim, bool kHalf, bool kLists, bool kSoftCap>
[[nodiscard]] cudaError_t launch_differentiate(const Arguments& arguments, cudaStream_t stream);

/// Enqueues the backward pass of a block: LSE and delta of the rows, and the main kernel. `dim` is
/// 64 or 128, at least the head dimensions; `half`: float16 rather than bfloat16. Overwrites
/// scaled_lse, padded_delta and turns. There are rows, columns and heads.
[[nodiscard]] cudaError_t launch_backward(const Arguments& arguments, int dim, bool half,
                                          cudaStream_t stream);

}  // namespace annulus::flash::backward
