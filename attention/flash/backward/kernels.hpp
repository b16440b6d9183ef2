#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/backward/arguments.hpp"

namespace annulus::flash::backward {

/// Rows of a box that TMA copies or adds: of dQ, dK and dV, of biases and dense masks.
inline constexpr int kBoxRows = 64;
/// Keys of a tile of the main kernel, and of the kernels of wide heads.
inline constexpr int kTileKeys = 128;
inline constexpr int kWideTileKeys = 64;
/// Query tiles of a block of the wide heads' kernel for dQ, one for each warpgroup.
inline constexpr int kWideQueryTiles = 2;

// `dim` below is the head dimension of the tiles of queries and keys: 64, 128, 192 or 256. That of
// the problem may be smaller. Tiles of values have the same, but 128 if `dim` is 192.

/// True for head dimensions whose dQ has a kernel of its own.
[[nodiscard]] constexpr bool is_wide(int dim) {
  return dim > 128;
}

/// A class says what a kernel does for each pair of query and key.
enum class PairClass : std::uint8_t {
  band,     ///< in masked tiles, tests the band and the lengths
  lists,    ///< walks by a TileMask, by which it tests pairs in masked tiles
  dropout,  ///< likewise; in all tiles, draws dropout
  general,  ///< likewise; also adds a bias, tests a dense mask and caps logits, as asked
};

/// Keys of a tile.
[[nodiscard]] constexpr int tile_keys(int dim) {
  return is_wide(dim) ? kWideTileKeys : kTileKeys;
}
/// Rows of a query tile. With 64 dims, the general class has fewer than the others, since it keeps
/// bias or mask in shared memory too.
[[nodiscard]] constexpr int tile_queries(int dim, PairClass pairs) {
  return dim == 64 && pairs != PairClass::general ? 128 : 64;
}

/// Enqueues the kernels that choose output_scale and write scaled_grad_output. launch_backward()
/// reads both.
[[nodiscard]] cudaError_t launch_output_scale(const Arguments& arguments,
                                              const RowTensor& grad_output, const RowTensor& value,
                                              cudaStream_t stream);

/// Enqueues the backward pass of a block: LSE and delta of the rows, and the main kernel. `dim` is
/// at least the head dimensions; `half`: float16 rather than bfloat16. Overwrites scaled_lse,
/// padded_delta and turns. There are rows, columns and heads.
[[nodiscard]] cudaError_t launch_backward(const Arguments& arguments, int dim, bool half,
                                          cudaStream_t stream);

/// Enqueues the main kernel with `blocks` thread blocks: one for each item, and a second one for
/// each split item. Each instance is compiled for both half types together, from kernel.cu.in. The
/// dropout class has no soft cap; the general class tests for one at run time.
template <int kDim, bool kHalf, PairClass kPairs, bool kSoftCap>
[[nodiscard]] cudaError_t launch_differentiate(const Arguments& arguments, unsigned blocks,
                                               cudaStream_t stream);
/// The same for wide heads. One kernel computes dK and dV and another dQ: see ScoreGradients. They
/// find lists and soft caps at run time. They need no turns, since they repeat bits anyway.
template <int kDim, int kValueDim, bool kHalf>
[[nodiscard]] cudaError_t launch_wide(const Arguments& arguments, cudaStream_t stream);

}  // namespace annulus::flash::backward
