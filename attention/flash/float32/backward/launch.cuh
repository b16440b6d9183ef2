#pragma once

#include <cstddef>

#include "flash/float32/backward/tile_gradients.cuh"

namespace annulus::flash::backward {

/// dK and dV of a key tile, from all query heads that share it.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    differentiate_keys(const __grid_constant__ Arguments a,
                       const __grid_constant__ Float32Operands operands) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& memory = *reinterpret_cast<Float32Memory<Tiles>*>(bytes);
  if (threadIdx.x == 0) memory.work.find(a, static_cast<std::int32_t>(blockIdx.x));
  __syncthreads();
  const Work<Tiles>& work = memory.work;
  if (a.mask.key_tiles == 0 && work.last_tile < work.first_tile) return;
  PassingQueries<Tiles> queries(a, work, memory.list_place);
  TileGradients<Tiles, true>(a, operands, memory).run(queries);
}

/// dQ of a query tile.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    differentiate_queries(const __grid_constant__ Arguments a,
                          const __grid_constant__ Float32Operands operands) {
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& memory = *reinterpret_cast<Float32Memory<Tiles>*>(bytes);
  if (threadIdx.x == 0) memory.rows.find(a, static_cast<std::int32_t>(blockIdx.x));
  __syncthreads();
  PassingKeys<Tiles> keys(a, memory.rows);
  TileGradients<Tiles, false>(a, operands, memory).run(keys);
}

template <class Tiles>
[[nodiscard]] cudaError_t launch_float32_kernel(void (*kernel)(Arguments, Float32Operands),
                                                const Arguments& a, const Float32Operands& operands,
                                                std::int32_t tokens, std::int32_t heads,
                                                cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(Float32Memory<Tiles>);
  static_assert(Tiles::kBlocks * (kShared + 1024) <= 228 * 1024);
  if (const cudaError_t code =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  const std::int32_t tiles = (tokens + kFloat32Tile - 1) / kFloat32Tile;
  kernel<<<static_cast<unsigned>(tiles * heads), Tiles::kThreads, kShared, stream>>>(a, operands);
  return cudaGetLastError();
}

template <class Tiles>
[[nodiscard]] cudaError_t launch_float32_tiles(const Arguments& a, const Float32Operands& operands,
                                               cudaStream_t stream) {
  const std::int32_t heads = a.batches * a.heads;
  if (a.grad_key.data != nullptr || a.grad_value.data != nullptr) {
    if (const cudaError_t code =
            launch_float32_kernel<Tiles>(differentiate_keys<Tiles>, a, operands, a.columns,
                                         heads / a.heads_per_kv_head, stream)) {
      return code;
    }
  }
  if (a.grad_query.data == nullptr) return cudaSuccess;
  return launch_float32_kernel<Tiles>(differentiate_queries<Tiles>, a, operands, a.rows, heads,
                                      stream);
}

}  // namespace annulus::flash::backward
