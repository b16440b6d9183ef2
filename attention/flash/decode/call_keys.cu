#include <cub/block/block_scan.cuh>

#include "flash/decode/kernels.hpp"

namespace annulus::flash::decode {
namespace {

constexpr std::int32_t kThreads = 512;

__device__ std::int32_t within(std::int32_t length, std::int32_t all) {
  return max(0, min(length, all));
}

/// A side of the band after the diagonal has moved.
__device__ std::int32_t moved(std::int32_t side, std::int64_t by) {
  constexpr std::int64_t kFar = BatchKeys::kFar;
  if (side == kFar || side == -kFar) return side;
  return static_cast<std::int32_t>(max(-kFar, min(side + by, kFar)));
}

/// Without first_tile.
__device__ BatchKeys keys_of(const CallKeys& call, std::int32_t batch) {
  BatchKeys keys = call.planned[batch];
  if (call.query_lengths != nullptr) {
    keys.rows = within(call.query_lengths[batch] - call.first_row, call.rows);
  }
  if (call.kv_lengths != nullptr) {
    keys.columns = within(call.kv_lengths[batch] - call.first_column, call.columns);
  }
  const std::int32_t offset = call.offsets != nullptr ? call.offsets[batch] : call.offset;
  keys.low = moved(keys.low, offset);
  keys.high = moved(keys.high, offset);
  keys.share();
  return keys;
}

/// One thread block, which takes as many batches at a time as it has threads.
__global__ void __launch_bounds__(kThreads)
    make_keys(const __grid_constant__ CallKeys call, BatchKeys* to) {
  using Scan = cub::BlockScan<std::int32_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  std::int32_t before = 0;  // tiles of all earlier batches
  for (std::int32_t first = 0; first <= call.batches; first += kThreads) {
    const std::int32_t batch = first + static_cast<std::int32_t>(threadIdx.x);
    BatchKeys keys;
    if (batch < call.batches) keys = keys_of(call, batch);
    std::int32_t tiles = 0;
    Scan(storage).ExclusiveSum(keys.tiles(call.tile_columns), keys.first_tile, tiles);
    __syncthreads();  // the storage is used again
    keys.first_tile += before;
    before += tiles;
    if (batch <= call.batches) to[batch] = keys;
  }
}

}  // namespace

cudaError_t launch_call_keys(const CallKeys& call, BatchKeys* keys, cudaStream_t stream) {
  make_keys<<<1, kThreads, 0, stream>>>(call, keys);
  return cudaGetLastError();
}

}  // namespace annulus::flash::decode
