#include <type_traits>

#include "flash/backward/kernel.cuh"
#include "flash/backward/kernels.hpp"

namespace annulus::flash::backward {
namespace {

// LSE and delta of each row of a query tile, and its flags.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kQueries)
    prepare_rows(const __grid_constant__ Arguments a) {
  constexpr int kQueries = Tiles::kQueries;
  const std::int32_t tiles = a.padded_rows / kQueries;
  const auto pair = static_cast<std::int32_t>(blockIdx.x) / tiles;
  const std::int32_t tile = static_cast<std::int32_t>(blockIdx.x) - pair * tiles;
  const auto in_tile = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t row = tile * kQueries + in_tile;
  const std::int32_t batch = pair / a.heads, head = pair - batch * a.heads;
  float lse = kInfinity, delta = 0;
  bool special = false;
  if (row < (a.row_lengths == nullptr ? a.rows : a.row_lengths[batch])) {
    const auto value = [&](const RowValues& values) {
      return values.data[batch * values.batch + head * values.head + row * values.row];
    };
    const float natural = value(a.lse);
    if (natural != -kInfinity) {
      lse = natural * kLog2E;
      delta = value(a.delta);
      special = is_special(lse) || is_special(delta);
    }
  }
  const bool any_hidden = __syncthreads_or(lse == kInfinity) != 0;
  const bool any_special = __syncthreads_or(special) != 0;
  float* const record = a.scaled_lse + std::int64_t{blockIdx.x} * (kQueries + kFlagValues);
  record[in_tile] = lse;
  if (in_tile < kFlagValues) {
    const int flags = (any_hidden ? kHiddenRows : 0) | (any_special ? kSpecialValues : 0);
    record[kQueries + in_tile] = __int_as_float(in_tile == 0 ? flags : 0);
  }
  a.padded_delta[std::int64_t{blockIdx.x} * kQueries + in_tile] = Tiles::score_scale(a) * delta;
  if (a.turns != nullptr && in_tile == 0) {
    a.turns[blockIdx.x] = 0;
    if (blockIdx.x == 0) *a.next_index = 0;
  }
}

template <class Element, int kDim>
cudaError_t launch_both(const Arguments& a, cudaStream_t stream) {
  using Shape = Tiles<Element, kDim>;
  constexpr bool kHalf = std::is_same_v<Element, __half>;
  const std::int64_t tiles = std::int64_t{a.batches} * a.heads * (a.padded_rows / Shape::kQueries);
  prepare_rows<Shape><<<static_cast<unsigned>(tiles), Shape::kQueries, 0, stream>>>(a);
  if (a.mask.key_tiles > 0) {
    return a.soft_cap != 0 ? launch_differentiate<kDim, kHalf, true, true>(a, stream)
                           : launch_differentiate<kDim, kHalf, true, false>(a, stream);
  }
  return a.soft_cap != 0 ? launch_differentiate<kDim, kHalf, false, true>(a, stream)
                         : launch_differentiate<kDim, kHalf, false, false>(a, stream);
}

}  // namespace

cudaError_t launch_backward(const Arguments& arguments, int dim, bool half, cudaStream_t stream) {
  if (dim == 64) {
    return half ? launch_both<__half, 64>(arguments, stream)
                : launch_both<__nv_bfloat16, 64>(arguments, stream);
  }
  return half ? launch_both<__half, 128>(arguments, stream)
              : launch_both<__nv_bfloat16, 128>(arguments, stream);
}

}  // namespace annulus::flash::backward
