#pragma once

#include <cstddef>

#include "flash/backward/wide_keys.cuh"
#include "flash/backward/wide_queries.cuh"

namespace annulus::flash::backward {

template <class Memory>
[[nodiscard]] cudaError_t take_shared_memory(void (*kernel)(Arguments, Part)) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
}

/// Enqueues the kernels for each part in turn. The one for dQ runs only if dQ is wanted.
template <class Tiles>
[[nodiscard]] cudaError_t launch_wide_tiles(const Arguments& a, cudaStream_t stream) {
  using KeyMemory = WideKeyMemory<Tiles>;
  using QueryMemory = WideQueryMemory<Tiles>;
  const auto of_keys = differentiate_wide_keys<Tiles>;
  const auto of_queries = differentiate_wide_queries<Tiles>;
  cudaError_t code = take_shared_memory<KeyMemory>(of_keys);
  if (code == cudaSuccess) code = take_shared_memory<QueryMemory>(of_queries);
  const auto blocks = [](std::int32_t tiles, std::int32_t of_a_block, std::int32_t heads) {
    return static_cast<unsigned>((tiles + of_a_block - 1) / of_a_block * heads);
  };
  const std::int32_t parts = Part::count(a);
  for (std::int32_t index = 0; index < parts && code == cudaSuccess; ++index) {
    const Part part(a, index);
    if (!part.may_see(a)) continue;
    of_keys<<<blocks(part.end_key - part.first_key, Tiles::kKeyTiles, part.pairs), Tiles::kThreads,
              sizeof(KeyMemory), stream>>>(a, part);
    if (a.grad_query.data != nullptr) {
      const std::int32_t heads = part.pairs * (part.end_head - part.first_head);
      of_queries<<<blocks(part.end_tile - part.first_tile, kWideQueryTiles, heads), Tiles::kThreads,
                   sizeof(QueryMemory), stream>>>(a, part);
    }
    code = cudaGetLastError();
  }
  return code;
}

template <class Element, int kDim, int kValueDim>
[[nodiscard]] cudaError_t launch_wide_class(const Arguments& a, cudaStream_t stream) {
  return a.general ? launch_wide_tiles<WideTiles<Element, kDim, kValueDim, true>>(a, stream)
                   : launch_wide_tiles<WideTiles<Element, kDim, kValueDim, false>>(a, stream);
}

}  // namespace annulus::flash::backward
