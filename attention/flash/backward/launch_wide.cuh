#pragma once

#include <cstddef>

#include "flash/backward/wide_keys.cuh"
#include "flash/backward/wide_queries.cuh"

namespace annulus::flash::backward {

template <class Memory>
[[nodiscard]] cudaError_t launch_part(void (*kernel)(Arguments, Part), const Arguments& a,
                                      const Part& part, std::int32_t blocks, int threads,
                                      cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(Memory);
  if (const cudaError_t code =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  kernel<<<static_cast<unsigned>(blocks), threads, kShared, stream>>>(a, part);
  return cudaGetLastError();
}

/// Enqueues both kernels for one part after the other.
template <class Tiles>
[[nodiscard]] cudaError_t launch_wide_tiles(const Arguments& a, cudaStream_t stream) {
  const auto divide = [](std::int32_t x, std::int32_t y) { return (x + y - 1) / y; };
  for (std::int32_t index = 0; index < Part::count(a); ++index) {
    const Part part(a, index);
    if (const cudaError_t code = launch_part<WideKeyMemory<Tiles>>(
            differentiate_wide_keys<Tiles>, a, part,
            divide(a.columns, Tiles::KeyBlock::kKeys) * part.pairs, Tiles::kThreads, stream)) {
      return code;
    }
    if (a.grad_query.data == nullptr) continue;
    const std::int32_t heads = part.pairs * (part.end_head - part.first_head);
    if (const cudaError_t code = launch_part<WideQueryMemory<Tiles>>(
            differentiate_wide_queries<Tiles>, a, part,
            divide(part.end_tile - part.first_tile, kWideQueryTiles) * heads, Tiles::kThreads,
            stream)) {
      return code;
    }
  }
  return cudaSuccess;
}

template <class Element, int kDim, int kValueDim>
[[nodiscard]] cudaError_t launch_wide_class(const Arguments& a, cudaStream_t stream) {
  return a.general ? launch_wide_tiles<WideTiles<Element, kDim, kValueDim, true>>(a, stream)
                   : launch_wide_tiles<WideTiles<Element, kDim, kValueDim, false>>(a, stream);
}

}  // namespace annulus::flash::backward
