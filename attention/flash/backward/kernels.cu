#include <algorithm>
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
      // A smaller LSE makes weights larger.
      const auto shift = static_cast<float>(Tiles<Element, 128>::weight_exponent(a));
      lse = a.natural_lse ? natural - shift * kLn2 : fmaf(natural, kLog2E, -shift);
      delta = Tiles<Element, 128>::output_factor(a) * value(a.delta);
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
  a.padded_delta[std::int64_t{blockIdx.x} * kQueries + in_tile] = delta;
  if (a.turns != nullptr && in_tile == 0) {
    a.turns[blockIdx.x] = 0;
    if (blockIdx.x == 0) *a.next_index = 0;
  }
}

constexpr int kScaleThreads = 256;

// The largest finite magnitude of eight values of float16, as its bits.
__device__ unsigned largest_of(const uint4& v) {
  unsigned largest = 0;
  for (const unsigned pair : {v.x, v.y, v.z, v.w}) {
    const unsigned magnitudes = pair & 0x7FFF7FFF;
    largest = __vmaxu2(largest, magnitudes & ~__vcmpgeu2(magnitudes, 0x7C007C00));
  }
  return max(largest & 0xFFFF, largest >> 16);
}

// True if the row of dO exists and sees a key by position. With sinks, the LSE of other rows is
// finite. Rows whose keys are all hidden otherwise, by ids, blocks, a dense mask or a bias, count.
__device__ bool sees_keys(const Arguments& a, std::int32_t batch, std::int32_t head,
                          std::int32_t row) {
  if (row >= (a.row_lengths == nullptr ? a.rows : a.row_lengths[batch]) ||
      a.lse.data[batch * a.lse.batch + head * a.lse.head + row * a.lse.row] == -kInfinity) {
    return false;
  }
  if (a.mask.key_tiles > 0) {
    const RowKeys& keys =
        a.mask.row_keys[(a.mask.batches > 1 ? std::int64_t{batch} * a.padded_rows : 0) + row];
    return keys.rest.begin < keys.rest.end || keys.opening.begin < keys.opening.end;
  }
  const std::int32_t columns = a.column_lengths == nullptr ? a.columns : a.column_lengths[batch];
  return max(row + a.low, 0) <= min(row + a.high, columns - 1);
}

// The largest finite magnitude, as its bits, in one of gridDim.y · parts parts of a head's rows, of
// which only some count.
template <class Counts>
__device__ unsigned largest_of(const RowTensor& rows, std::int32_t batch, std::int32_t head,
                               std::int32_t count, std::int32_t part, std::int32_t parts,
                               Counts counts) {
  const __half* const values =
      static_cast<const __half*>(rows.data) + batch * rows.strides.batch + head * rows.strides.head;
  const std::int32_t packs = rows.dim / 8;
  const std::int32_t lanes = packs <= 8 ? 8 : packs <= 16 ? 16 : 32;
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % lanes;
  if (lane >= packs) return 0;
  unsigned largest = 0;
  const std::int32_t at_a_time = kScaleThreads / lanes;
  const std::int32_t step = static_cast<std::int32_t>(gridDim.y) * parts * at_a_time;
  for (std::int32_t row = (static_cast<std::int32_t>(blockIdx.y) * parts + part) * at_a_time +
                          static_cast<std::int32_t>(threadIdx.x) / lanes;
       row < count; row += step) {
    if (!counts(row)) continue;
    const auto* const packed = reinterpret_cast<const uint4*>(values + row * rows.strides.sequence);
    largest = max(largest, largest_of(packed[lane]));
  }
  return largest;
}

// Chooses output_scale. The last thread block to finish does, from what all found.
__global__ void __launch_bounds__(kScaleThreads)
    fit_output_scale(const __grid_constant__ Arguments a,
                     const __grid_constant__ RowTensor grad_output,
                     const __grid_constant__ RowTensor value) {
  OutputScale& scale = *a.output_scale;
  const auto pair = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t batch = pair / a.heads, head = pair - batch * a.heads;
  const auto counts = [&](std::int32_t row) { return sees_keys(a, batch, head, row); };
  const std::int32_t columns = a.column_lengths == nullptr ? a.columns : a.column_lengths[batch];
  const auto add = [](std::uint32_t& to, float mine) {
    const unsigned bits = __reduce_max_sync(0xffffffff, __float_as_uint(mine));
    if (threadIdx.x % 32 == 0 && bits != 0) atomicMax(&to, bits);
  };
  const auto magnitude = [](unsigned bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  };
  add(scale.largest[0], magnitude(largest_of(grad_output, batch, head, a.rows, 0, 1, counts)));
  // The heads of a group share the rows of their value head.
  add(scale.largest[1], magnitude(largest_of(value, batch, head / a.heads_per_kv_head, columns,
                                             head % a.heads_per_kv_head, a.heads_per_kv_head,
                                             [](std::int32_t) { return true; })));
  float delta = 0, lse = 0;
  const auto raise = [&](float& most, const RowValues& values, std::int32_t row) {
    const float x =
        fabsf(values.data[batch * values.batch + head * values.head + row * values.row]);
    if (x < kInfinity) most = fmaxf(most, x);
  };
  for (std::int32_t row = static_cast<std::int32_t>(blockIdx.y * kScaleThreads + threadIdx.x);
       row < a.rows; row += static_cast<std::int32_t>(gridDim.y) * kScaleThreads) {
    if (!counts(row)) continue;
    raise(delta, a.delta, row);
    raise(lse, a.lse, row);
  }
  add(scale.largest[2], delta);
  add(scale.largest[3], lse);
  __threadfence();
  __syncthreads();  // all warps have added before one thread counts the block
  if (!__syncthreads_or(threadIdx.x == 0 &&
                        atomicAdd(&scale.blocks, 1) == gridDim.x * gridDim.y - 1)) {
    return;
  }
  if (threadIdx.x != 0) return;
  __threadfence();  // the other blocks' maxima are read after their counts
  const auto largest = [&](int i) { return __uint_as_float(__ldcg(&scale.largest[i])); };
  const float bound =
      largest(0) * largest(1) * static_cast<float>(grad_output.dim) * a.value_scale + largest(2);
  // The exponent of the factor. The bound and dO stay below 2^15. The largest dO does not fall
  // below 2^-11, so that it keeps an accuracy of 2^-14, which dV needs. Values of float16 allow
  // both; only a huge delta or dropout of nearly all pairs can exceed the bound then. Weights get
  // what the largest dO has above 1/2, unless a large LSE would be rounded too coarsely.
  int power = 0, weight_exponent = 0;
  if (bound > 0) {
    power = 14 - ilogbf(bound);
    if (largest(0) > 0) {
      const int exponent = ilogbf(largest(0));
      power = min(max(power, -11 - exponent), 14 - exponent);
      if (largest(3) < 4096) weight_exponent = min(max(power + exponent + 1, 0), 8);
      power -= weight_exponent;
    } else {
      power = min(power, 38);
    }
  }
  scale.factor = ldexpf(1, power);
  scale.inverse = ldexpf(1, -power - weight_exponent);
  scale.weight_exponent = weight_exponent;
}

// copy = dO · factor, [batch, row, head, dim], and 0 in rows that see nothing.
__global__ void __launch_bounds__(kScaleThreads)
    copy_output_gradient(const __grid_constant__ Arguments a,
                         const __grid_constant__ RowTensor from, std::int64_t packs, uint4* copy) {
  const float factor = a.output_scale->factor;
  const auto in_row = static_cast<std::uint32_t>(from.dim / 8);
  const auto heads = static_cast<std::uint32_t>(a.heads), rows = static_cast<std::uint32_t>(a.rows);
  const std::int64_t step = std::int64_t{gridDim.x} * kScaleThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kScaleThreads + threadIdx.x; i < packs;
       i += step) {
    const auto pair = static_cast<std::uint32_t>(i / in_row);  // fewer than 2^32 rows of all heads
    const std::uint32_t position = pair / heads, batch = position / rows;
    const __half* const values = static_cast<const __half*>(from.data) +
                                 batch * from.strides.batch +
                                 (position - batch * rows) * from.strides.sequence +
                                 (pair - position * heads) * from.strides.head;
    uint4 pack{};
    if (sees_keys(a, static_cast<std::int32_t>(batch),
                  static_cast<std::int32_t>(pair - position * heads),
                  static_cast<std::int32_t>(position - batch * rows))) {
      pack = reinterpret_cast<const uint4*>(values)[i - std::int64_t{pair} * in_row];
    }
    for (unsigned* two : {&pack.x, &pack.y, &pack.z, &pack.w}) {
      __half2& both = *reinterpret_cast<__half2*>(two);
      const float2 x = __half22float2(both);
      both = __floats2half2_rn(x.x * factor, x.y * factor);
    }
    copy[i] = pack;
  }
}

unsigned blocks(std::int64_t work, std::int64_t of_a_block) {
  return static_cast<unsigned>((work + of_a_block - 1) / of_a_block);
}

template <class Tiles>
[[nodiscard]] cudaError_t launch_preparation(const Arguments& a, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{a.batches} * a.heads * a.padded_rows;
  constexpr int kQueries = Tiles::kQueries;
  prepare_rows<typename Tiles::Element, kQueries>
      <<<blocks(rows, kQueries), kQueries, 0, stream>>>(a);
  return cudaGetLastError();
}

template <int kDim, bool kHalf, PairClass kPairs, bool kSoftCap>
using NarrowTiles = Tiles<std::conditional_t<kHalf, __half, __nv_bfloat16>, kDim, kPairs, kSoftCap>;

template <int kDim, bool kHalf, PairClass kPairs, bool kSoftCap>
[[nodiscard]] cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  const unsigned items = blocks(a.columns, kTileKeys) *
                         static_cast<unsigned>(a.batches * (a.heads / a.heads_per_kv_head));
  const cudaError_t prepared =
      launch_preparation<NarrowTiles<kDim, kHalf, kPairs, kSoftCap>>(a, stream);
  if (prepared != cudaSuccess) return prepared;
  return launch_differentiate<kDim, kHalf, kPairs, kSoftCap>(
      a, items + static_cast<unsigned>(a.split_items), stream);
}

template <int kDim, bool kHalf>
[[nodiscard]] cudaError_t launch(const Arguments& a, cudaStream_t stream) {
  constexpr PairClass kBand = PairClass::band, kLists = PairClass::lists;
  const bool lists = a.mask.key_tiles > 0, cap = a.soft_cap != 0;
  if (a.general) return launch<kDim, kHalf, PairClass::general, false>(a, stream);
  if (a.dropout.threshold != 0) return launch<kDim, kHalf, PairClass::dropout, false>(a, stream);
  if (lists && cap) return launch<kDim, kHalf, kLists, true>(a, stream);
  if (lists) return launch<kDim, kHalf, kLists, false>(a, stream);
  if (cap) return launch<kDim, kHalf, kBand, true>(a, stream);
  return launch<kDim, kHalf, kBand, false>(a, stream);
}

template <bool kHalf>
[[nodiscard]] cudaError_t launch(const Arguments& a, int dim, cudaStream_t stream) {
  if (dim == 64) return launch<64, kHalf>(a, stream);
  if (dim == 128) return launch<128, kHalf>(a, stream);
  using Narrow = NarrowTiles<128, kHalf, PairClass::band, false>;
  static_assert(Narrow::kQueries == tile_queries(256, PairClass::band));
  const cudaError_t prepared = launch_preparation<Narrow>(a, stream);
  if (prepared != cudaSuccess) return prepared;
  return dim == 192 ? launch_wide<192, 128, kHalf>(a, stream)
                    : launch_wide<256, 256, kHalf>(a, stream);
}

}  // namespace

cudaError_t launch_output_scale(const Arguments& arguments, const RowTensor& grad_output,
                                const RowTensor& value, cudaStream_t stream) {
  const cudaError_t cleared =
      cudaMemsetAsync(arguments.output_scale, 0, sizeof(OutputScale), stream);
  if (cleared != cudaSuccess) return cleared;
  // About eight thread blocks for each multiprocessor, of 64 rows or more.
  constexpr unsigned kBlocks = 1056;
  dim3 grid(static_cast<unsigned>(arguments.batches * arguments.heads));
  grid.y =
      std::clamp(kBlocks / grid.x, 1U, blocks(std::max(arguments.rows, arguments.columns), 64));
  fit_output_scale<<<grid, kScaleThreads, 0, stream>>>(arguments, grad_output, value);
  const std::int64_t packs =
      std::int64_t{arguments.batches} * arguments.rows * arguments.heads * (grad_output.dim / 8);
  copy_output_gradient<<<std::min(blocks(packs, kScaleThreads), 4096U), kScaleThreads, 0, stream>>>(
      arguments, grad_output, packs, static_cast<uint4*>(arguments.scaled_grad_output));
  return cudaGetLastError();
}

cudaError_t launch_backward(const Arguments& arguments, int dim, bool half, cudaStream_t stream) {
  return half ? launch<true>(arguments, dim, stream) : launch<false>(arguments, dim, stream);
}

cudaError_t launch_float32_backward(const Arguments& arguments, const Float32Operands& operands,
                                    int dim, cudaStream_t stream) {
  using Rows = Tiles<__nv_bfloat16, 128>;  // without modifiers, the operands' type does not matter
  static_assert(Rows::kQueries == kFloat32Tile && !Rows::kScalesOutput);
  const cudaError_t prepared = launch_preparation<Rows>(arguments, stream);
  if (prepared != cudaSuccess) return prepared;
  return dim == 64 ? launch_float32<64>(arguments, operands, stream)
                   : launch_float32<128>(arguments, operands, stream);
}

}  // namespace annulus::flash::backward
