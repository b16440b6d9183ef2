#pragma once

#include <cstddef>

#include "flash/backward/wide_keys.cuh"
#include "flash/backward/wide_queries.cuh"

namespace annulus::flash::backward {

template <class Memory>
[[nodiscard]] cudaError_t launch_with(void (*kernel)(Arguments), const Arguments& a,
                                      std::int32_t blocks, int threads, cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(Memory);
  if (const cudaError_t code =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, kShared, stream>>>(a);
  return cudaGetLastError();
}

/// Enqueues the kernels of the gradients that are wanted.
template <class Tiles>
[[nodiscard]] cudaError_t launch_wide_tiles(const Arguments& a, cudaStream_t stream) {
  const auto blocks = [](std::int32_t rows, std::int32_t of_a_block, std::int32_t heads) {
    return (rows + of_a_block - 1) / of_a_block * heads;
  };
  if (a.grad_key.data != nullptr || a.grad_value.data != nullptr) {
    const std::int32_t kv_heads = a.batches * (a.heads / a.heads_per_kv_head);
    Arguments of_keys = a;
    // The order is of single key tiles, not of pairs.
    if (Tiles::kKeyTiles > 1) of_keys.mask.key_tile_order = nullptr;
    if (const cudaError_t code = launch_with<WideKeyMemory<Tiles>>(
            differentiate_wide_keys<Tiles>, of_keys,
            blocks(a.columns, Tiles::KeyBlock::kKeys, kv_heads), Tiles::kThreads, stream)) {
      return code;
    }
  }
  if (a.grad_query.data == nullptr && a.grad_bias == nullptr) return cudaSuccess;
  return launch_with<WideQueryMemory<Tiles>>(
      differentiate_wide_queries<Tiles>, a,
      blocks(a.rows, 2 * Tiles::kQueries, a.batches * a.heads), Tiles::kThreads, stream);
}

template <class Element, int kDim, int kValueDim>
[[nodiscard]] cudaError_t launch_wide_class(const Arguments& a, cudaStream_t stream) {
  return a.general ? launch_wide_tiles<WideTiles<Element, kDim, kValueDim, true>>(a, stream)
                   : launch_wide_tiles<WideTiles<Element, kDim, kValueDim, false>>(a, stream);
}

}  // namespace annulus::flash::backward
