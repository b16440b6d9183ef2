#include <algorithm>

#include "flash/backward/kernel.cuh"
#include "flash/backward/kernels.hpp"

namespace annulus::flash::backward {
namespace {

constexpr int kWarps = 8;  // of a block of the kernels beside the main one, which take a row each

template <class Element>
__device__ __forceinline__ float2 pair_of(std::uint32_t bits);
template <>
__device__ __forceinline__ float2 pair_of<__nv_bfloat16>(std::uint32_t bits) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
}
template <>
__device__ __forceinline__ float2 pair_of<__half>(std::uint32_t bits) {
  return __half22float2(reinterpret_cast<const __half2&>(bits));
}

// LSE and delta of each row; a warp per row.
template <class Element, int kDim>
__global__ void __launch_bounds__(32 * kWarps)
    preprocess(const __grid_constant__ Arguments a, const __grid_constant__ Outputs outputs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row = static_cast<std::int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const auto pair = static_cast<std::int32_t>(blockIdx.y);
  if (row >= a.padded_rows) return;
  const std::int32_t batch = pair / a.heads, head = pair - batch * a.heads;
  float lse = kInfinity, delta = 0;
  if (row < a.rows) {
    const auto value = [&](const void* data, const Strides& strides, int dim) {
      const std::int64_t at =
          batch * strides.batch + row * strides.sequence + head * strides.head + dim;
      return pair_of<Element>(
          *reinterpret_cast<const std::uint32_t*>(static_cast<const Element*>(data) + at));
    };
#pragma unroll
    for (int dim = 0; dim < kDim; dim += 64) {
      const float2 o = value(outputs.output, outputs.output_strides, dim + 2 * lane);
      const float2 g = value(outputs.grad_output, outputs.grad_output_strides, dim + 2 * lane);
      delta = fmaf(o.x, g.x, fmaf(o.y, g.y, delta));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, distance);
    }
    const std::int64_t at = std::int64_t{pair} * a.rows + row;
    lse = outputs.lse[at] == -kInfinity ? kInfinity : outputs.lse[at] * kLog2E;
    if (outputs.grad_lse != nullptr && lse != kInfinity) delta -= outputs.grad_lse[at];
    if (lse == kInfinity) delta = 0;
  }
  if (lane != 0) return;
  a.lse[std::int64_t{pair} * a.padded_rows + row] = lse;
  a.delta[std::int64_t{pair} * a.padded_rows + row] = delta;
}

// dQ from the sums, which lie as the threads of the main kernel held them; a warp per row.
template <class Element, int kDim>
__global__ void __launch_bounds__(32 * kWarps) convert(const __grid_constant__ Arguments a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto row = static_cast<std::int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const auto pair = static_cast<std::int32_t>(blockIdx.y);
  if (row >= a.rows) return;
  const std::int32_t batch = pair / a.heads, head = pair - batch * a.heads;
  constexpr int kQueries = Tiles<Element, kDim>::kQueries;
  const std::int32_t in_tile = row % kQueries;
  const float* const tile =
      a.query_sum + (std::int64_t{pair} * a.padded_rows + row - in_tile) * kDim;
#pragma unroll
  for (int first = 0; first < kDim; first += 64) {
    const int dim = first + 2 * lane;
    const int warp = (in_tile / 64 + first / 64) * 4 + in_tile % 64 / 16;
    const int i = dim % 64 / 8, thread = in_tile % 8 * 4 + dim % 8 / 2, h = in_tile / 8 % 2;
    const float2 sum =
        *reinterpret_cast<const float2*>(tile + warp * 1024 + (i * 32 + thread) * 4 + 2 * h);
    store_pair<Element>(a.grad_query,
                        batch * a.grad_query.strides.batch + row * a.grad_query.strides.sequence +
                            head * a.grad_query.strides.head + dim,
                        a.scale * sum.x, a.scale * sum.y);
  }
}

template <class Element, int kDim>
cudaError_t launch(const Arguments& a, const Outputs& outputs, cudaStream_t stream) {
  using Shape = Tiles<Element, kDim>;
  constexpr std::size_t kShared = sizeof(SharedTiles<Shape>);
  const auto pairs = static_cast<unsigned>(a.batches * a.heads);
  const auto blocks = [&](std::int32_t rows) {
    return dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps), pairs);
  };
  const std::size_t sum_bytes = sizeof(float) * pairs * a.padded_rows * kDim;
  if (const cudaError_t code = cudaMemsetAsync(a.query_sum, 0, sum_bytes, stream)) return code;
  preprocess<Element, kDim><<<blocks(a.padded_rows), 32 * kWarps, 0, stream>>>(a, outputs);
  if (const cudaError_t code = cudaFuncSetAttribute(
          differentiate<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  const auto items = static_cast<unsigned>((a.columns + Shape::kKeys - 1) / Shape::kKeys) * pairs /
                     static_cast<unsigned>(a.heads_per_kv_head);
  differentiate<Shape><<<items, Shape::kThreads, kShared, stream>>>(a);
  convert<Element, kDim><<<blocks(a.rows), 32 * kWarps, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_backward(const Arguments& arguments, const Outputs& outputs, int dim, bool half,
                            cudaStream_t stream) {
  if (dim == 64) {
    return half ? launch<__half, 64>(arguments, outputs, stream)
                : launch<__nv_bfloat16, 64>(arguments, outputs, stream);
  }
  return half ? launch<__half, 128>(arguments, outputs, stream)
              : launch<__nv_bfloat16, 128>(arguments, outputs, stream);
}

}  // namespace annulus::flash::backward
