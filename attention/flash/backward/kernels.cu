#include <cstdint>
#include <type_traits>

#include "flash/backward/kernel.cuh"
#include "flash/backward/kernels.hpp"
#include "flash/float32/backward/kernels.hpp"
#include "flash/hopper/early_launch.cuh"

namespace annulus::flash::backward {
namespace {

// LSE and delta of each row of a query tile, and its flags.
template <class Element, int kQueries>
__global__ void __launch_bounds__(kQueries) prepare_rows(const __grid_constant__ Arguments a) {
  hopper::allow_next_kernel();
  const std::int32_t tiles = a.padded_rows / kQueries;
  const auto pair = static_cast<std::int32_t>(blockIdx.x) / tiles;
  const std::int32_t tile = static_cast<std::int32_t>(blockIdx.x) - pair * tiles;
  const auto in_tile = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t row = tile * kQueries + in_tile;
  const std::int32_t batch = pair / a.heads, head = pair - batch * a.heads;
  float lse = kInfinity, delta = 0;
  bool special = false;
  if (row < (a.row_lengths == nullptr ? a.rows : a.row_lengths[batch])) {
    for (const RowTensor* rows : {&a.query_rows, &a.grad_output_rows}) {
      if (rows->data == nullptr) continue;
      const Element* const values = static_cast<const Element*>(rows->data) +
                                    batch * rows->strides.batch + row * rows->strides.sequence +
                                    head * rows->strides.head;
      special = special || any_special<Element, 1>(values, rows->dim, 0);
    }
    const auto value = [&](const RowValues& values) {
      return values.data[batch * values.batch + head * values.head + row * values.row];
    };
    const float natural = value(a.lse);
    if (natural != -kInfinity) {
      lse = a.natural_lse ? natural : natural * kLog2E;
      delta = value(a.delta);
      special = special || is_special(lse) || is_special(delta);
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
  a.padded_delta[std::int64_t{blockIdx.x} * kQueries + in_tile] =
      Tiles<Element, 128>::score_scale(a) * delta;
  if (a.turns != nullptr && in_tile == 0) {
    a.turns[blockIdx.x] = 0;
    if (blockIdx.x == 0) *a.next_index = 0;
  }
}

unsigned blocks(std::int64_t work, std::int64_t of_a_block) {
  return static_cast<unsigned>((work + of_a_block - 1) / of_a_block);
}

template <class Tiles>
void launch_preparation(const Arguments& a, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{a.batches} * a.heads * a.padded_rows;
  constexpr int kQueries = Tiles::kQueries;
  prepare_rows<typename Tiles::Element, kQueries>
      <<<blocks(rows, kQueries), kQueries, 0, stream>>>(a);
}

template <int kDim, bool kHalf, PairClass kPairs, bool kSoftCap>
using NarrowTiles = Tiles<std::conditional_t<kHalf, __half, __nv_bfloat16>, kDim, kPairs, kSoftCap>;

template <int kDim, bool kHalf, PairClass kPairs, bool kSoftCap>
cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  const unsigned items = blocks(a.columns, kTileKeys) *
                         static_cast<unsigned>(a.batches * (a.heads / a.heads_per_kv_head));
  launch_preparation<NarrowTiles<kDim, kHalf, kPairs, kSoftCap>>(a, stream);
  return launch_differentiate<kDim, kHalf, kPairs, kSoftCap>(a, items, stream);
}

template <int kDim, bool kHalf>
cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  constexpr PairClass kBand = PairClass::band, kLists = PairClass::lists;
  const bool lists = a.mask.key_tiles > 0, cap = a.soft_cap != 0;
  if (a.general) return launch<kDim, kHalf, PairClass::general, false>(a, stream);
  if (lists && cap) return launch<kDim, kHalf, kLists, true>(a, stream);
  if (lists) return launch<kDim, kHalf, kLists, false>(a, stream);
  if (cap) return launch<kDim, kHalf, kBand, true>(a, stream);
  return launch<kDim, kHalf, kBand, false>(a, stream);
}

template <bool kHalf>
cudaError_t launch(const Arguments& a, int dim, cudaStream_t stream) {
  if (dim == 64) return launch<64, kHalf>(a, stream);
  if (dim == 128) return launch<128, kHalf>(a, stream);
  using Narrow = NarrowTiles<128, kHalf, PairClass::band, false>;
  static_assert(Narrow::kQueries == tile_queries(256, PairClass::band));
  launch_preparation<Narrow>(a, stream);
  return dim == 192 ? launch_wide<192, 128, kHalf>(a, stream)
                    : launch_wide<256, 256, kHalf>(a, stream);
}

}  // namespace

cudaError_t launch_backward(const Arguments& arguments, int dim, bool half, cudaStream_t stream) {
  return half ? launch<true>(arguments, dim, stream) : launch<false>(arguments, dim, stream);
}

cudaError_t launch_float32_backward(const Arguments& arguments, const Float32Operands& operands,
                                    int dim, cudaStream_t stream) {
  using Rows = Tiles<__nv_bfloat16, 128>;  // without modifiers, the operands' type does not matter
  static_assert(Rows::kQueries == kFloat32Tile && Rows::kScaledScores);
  launch_preparation<Rows>(arguments, stream);
  return dim == 64 ? launch_float32<64>(arguments, operands, stream)
                   : launch_float32<128>(arguments, operands, stream);
}

}  // namespace annulus::flash::backward
