#include "flash/decode/kernels.hpp"

namespace annulus::flash::decode {
namespace {

constexpr unsigned kAll = 0xffffffff;
constexpr int kLanes = 32;

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
  if (call.offsets != nullptr) {
    const std::int64_t by = std::int64_t{call.offsets[batch]} - call.planned_offset;
    keys.low = moved(keys.low, by);
    keys.high = moved(keys.high, by);
  }
  keys.share();
  return keys;
}

/// One warp, which takes the batches in groups of its size.
__global__ void make_keys(const __grid_constant__ CallKeys call, BatchKeys* to) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t before = 0;  // tiles of all earlier groups
  for (std::int32_t group = 0; group <= call.batches; group += kLanes) {
    const std::int32_t batch = group + lane;
    BatchKeys keys;
    if (batch < call.batches) keys = keys_of(call, batch);
    const std::int32_t own = batch < call.batches ? keys.tiles(call.tile_columns) : 0;
    std::int32_t up_to = own;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const std::int32_t others = __shfl_up_sync(kAll, up_to, distance);
      if (lane >= distance) up_to += others;
    }
    keys.first_tile = before + up_to - own;
    if (batch <= call.batches) to[batch] = keys;
    before += __shfl_sync(kAll, up_to, kLanes - 1);
  }
}

}  // namespace

cudaError_t launch_call_keys(const CallKeys& call, BatchKeys* keys, cudaStream_t stream) {
  make_keys<<<1, kLanes, 0, stream>>>(call, keys);
  return cudaGetLastError();
}

}  // namespace annulus::flash::decode
