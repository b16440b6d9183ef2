#pragma once

#include "flash/async_copy.cuh"
#include "flash/decode/kernels.hpp"
#include "flash/decode/warp_products.cuh"
#include "flash/hopper/early_launch.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash::decode {

/// Tiles and threads of the kernel for head dimensions up to kHeadDim_ and kValueDim_ (multiples of
/// 64; smaller ones are padded with zeros by the copies).
template <class Element_, int kHeadDim_, int kValueDim_>
struct DecodeShape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kRows = 16;  ///< of a warp's products; also the columns that it copies
  /// Columns that a warp computes at a time if its team has others: more where registers suffice.
  static constexpr int kColumnsAtOnce = kHeadDim + kValueDim <= 256 ? 32 : 16;
  static constexpr int kWarps = kValueDim > 128 ? 4 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = kRows * kWarps;  ///< of a key tile
  static constexpr int kTileElements = kColumns * (kHeadDim + kValueDim);
  static constexpr int kTileBytes = 2 * kTileElements;
  /// Tiles in shared memory: as many as fit, since what is under way must cover the latency of the
  /// memory at its full rate, about 40 KB for each multiprocessor.
  static constexpr int kStages = 224 * 1024 / kTileBytes;
  static_assert(kStages >= 2);
};

template <class Shape>
struct DecodeShared {
  using Element = typename Shape::Element;
  alignas(128) Element tiles[Shape::kStages][Shape::kTileElements];  // keys, then values
  float2 weights[Shape::kWarps][Shape::kRows];  // see DecodeArguments::part_weights
};

/// A thread block's share of the work. Warps form teams, in which each warp has 16 of the rows, and
/// each team has columns of its own of every tile: as many times 16 as it has warps. Each warp
/// copies 16 columns, and a team waits for nobody else, so that some compute while others wait.
/// The teams' sums are added where a part ends, in the shared memory of its last tile.
template <class Shape>
class Decoder {
  using Element = typename Shape::Element;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kOutputs = Shape::kValueDim / 2;
  static constexpr int kVector = 8;  // elements of 16 bytes
  static constexpr unsigned kAll = 0xffffffff;
  static_assert(Shape::kWarps * kRows * Shape::kValueDim * sizeof(float) <= Shape::kTileBytes);

 public:
  __device__ __forceinline__ Decoder(const DecodeArguments& arguments, DecodeShared<Shape>& memory)
      : a(arguments), shared(memory) {
    warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    team_warps = a.rows <= kRows ? 1 : a.rows <= 2 * kRows ? 2 : 4;
    first_row = warp % team_warps * kRows;
    first_column = warp / team_warps * team_warps * kRows;
  }

  __device__ __forceinline__ void run() {
    const KeySplit split = a.split.of_call();
    if (blockIdx.x >= split.blocks) return;
    const std::int64_t first = split.first_tile(blockIdx.x);
    const auto tiles = static_cast<int>(split.first_tile(blockIdx.x + 1) - first);
    auto pair = static_cast<std::int32_t>(split.pair_of(first));
    const auto skipped = static_cast<int>(first - split.first_tile_of_pair(pair));
    source.begin(a, pair, skipped, warp);
    source.tiles = tiles;
    for (int s = 0; s < Shape::kStages; ++s) copy_tile(s);
    begin(pair);
    std::int32_t columns = columns_of(a, pair) - skipped * Shape::kColumns;  // left of the pair
    int stage = 0;
    for (int tile = 0; tile < tiles; ++tile) {
      async_wait<Shape::kStages - 1>();
      team_barrier();  // the tile is here
      attend(shared.tiles[stage], columns);
      columns -= Shape::kColumns;
      if (columns <= 0 || tile + 1 == tiles) {
        __syncthreads();  // all teams are done with the tile
        finish(a.split.part(pair, blockIdx.x), reinterpret_cast<float*>(shared.tiles[stage]));
        __syncthreads();  // what finish() put into the tile's place is done with
      } else {
        team_barrier();  // the tile is done with
      }
      copy_tile(stage);
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      if (columns <= 0 && tile + 1 < tiles) {
        pair = static_cast<std::int32_t>(a.split.next(pair));
        begin(pair);
        columns = columns_of(a, pair);
      }
    }
  }

 private:
  // Columns of a pair that all rows see.
  __device__ __forceinline__ static std::int32_t columns_of(const DecodeArguments& a,
                                                            std::int32_t pair) {
    if (a.split.keys == nullptr) return a.columns;
    const BatchKeys& keys = a.split.keys[pair / a.kv_heads];
    return keys.end - keys.begin;
  }

  // The columns of a tile that the warp copies next.
  struct Source {
    int tiles;  // that are still to be copied
    std::int32_t pair;
    std::int32_t columns;  // from the warp's first one to the end of the pair's
    const Element* key;
    const Element* value;

    // Behind so many tiles of the pair.
    __device__ __forceinline__ void begin(const DecodeArguments& a, std::int32_t to_pair,
                                          int skipped, int warp) {
      pair = to_pair;
      const std::int32_t batch = pair / a.kv_heads;
      const std::int32_t head = pair - batch * a.kv_heads;
      std::int32_t column = skipped * Shape::kColumns + warp * kRows;
      columns = columns_of(a, pair) - column;
      if (a.split.keys != nullptr) column += a.split.keys[batch].begin;
      const auto at = [&](const void* tensor, const Strides& s) {
        return static_cast<const Element*>(tensor) + batch * s.batch + head * s.head +
               column * s.sequence;
      };
      key = at(a.tensors.key, a.tensors.key_strides);
      value = at(a.tensors.value, a.tensors.value_strides);
    }
    __device__ __forceinline__ void advance(const DecodeArguments& a, int warp) {
      --tiles;
      columns -= Shape::kColumns;
      if (columns + warp * kRows <= 0) {
        if (tiles > 0) begin(a, static_cast<std::int32_t>(a.split.next(pair)), 0, warp);
        return;
      }
      key += Shape::kColumns * a.tensors.key_strides.sequence;
      value += Shape::kColumns * a.tensors.value_strides.sequence;
    }
  };

  // The barriers of the teams are numbered from 1.
  __device__ __forceinline__ void team_barrier() const {
    if (team_warps == 1) return __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp / team_warps), "r"(32 * team_warps) : "memory");
  }

  // The place of a row's vector in a tile. Vectors trade places inside 128 bytes, so that eight
  // rows are read from different banks.
  template <int kDims>
  __device__ __forceinline__ static int place(int row, int vector) {
    return row * kDims + (vector ^ row % 8) * kVector;
  }

  // Starts the warp's next copies, and closes their group, which is empty past the last tile.
  __device__ __forceinline__ void copy_tile(int stage) {
    if (source.tiles > 0) {
      Element* const keys = shared.tiles[stage] + warp * kRows * Shape::kHeadDim;
      Element* const values =
          shared.tiles[stage] + Shape::kColumns * Shape::kHeadDim + warp * kRows * Shape::kValueDim;
      copy_rows<Shape::kHeadDim>(keys, source.key, a.tensors.key_strides.sequence,
                                 a.tensors.head_dim);
      copy_rows<Shape::kValueDim>(values, source.value, a.tensors.value_strides.sequence,
                                  a.value_dim);
      source.advance(a, warp);
    }
    async_commit();
  }

  // 16 rows. Those past the end of the sequence become zeros, and so do dimensions from `dims` on.
  template <int kDims>
  __device__ __forceinline__ void copy_rows(Element* to, const Element* from, std::int64_t stride,
                                            int dims) const {
    constexpr int kVectors = kDims / kVector;
#pragma unroll(kDims <= 64 ? 8 : kDims <= 128 ? 4 : 2)
    for (int i = 0; i < kRows * kVectors / 32; ++i) {
      const int index = lane + i * 32;
      const int row = index / kVectors;
      const int vector = index % kVectors;
      async_copy(to + place<kDims>(row, vector), from + row * stride + vector * kVector,
                 row < source.columns && vector * kVector < dims);
    }
  }

  // Loads the warp's queries of a pair, and empties its state.
  __device__ __forceinline__ void begin(std::int32_t pair) {
    const std::int32_t batch = pair / a.kv_heads;
    const std::int32_t first_head = (pair - batch * a.kv_heads) * a.heads_per_kv_head;
    const Strides& s = a.tensors.query_strides;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + lane / 4 + 8 * h;
      const int query_row = row / a.heads_per_kv_head;
      const int head = row - query_row * a.heads_per_kv_head;
      const Element* const from = static_cast<const Element*>(a.tensors.query) + batch * s.batch +
                                  (first_head + head) * s.head + query_row * s.sequence;
#pragma unroll
      for (int i = 0; i < Shape::kHeadDim / 8; ++i) {
        const int dim = 8 * i + lane % 4 * 2;
        query[i / 2][i % 2 * 2 + h] = row < a.rows && dim < a.tensors.head_dim
                                          ? *reinterpret_cast<const std::uint32_t*>(from + dim)
                                          : 0;
      }
      maximum[h] = -kLargest / 2;  // finite, so that logits of −∞ have weight 0 beside it
      sum[h] = 0;
    }
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[n][e] = 0;
    }
  }

  // Adds the team's columns of a tile, of which the first `columns` exist.
  __device__ __forceinline__ void attend(const Element* tile, std::int32_t columns) {
    if (first_row >= a.rows) return;
    const int end = min(columns, first_column + team_warps * kRows);
    if (Shape::kColumnsAtOnce > kRows && team_warps > 1) {
      add_range<Shape::kColumnsAtOnce>(tile, end, columns);
    } else {
      add_range<kRows>(tile, end, columns);
    }
  }
  template <int kStep>
  __device__ __forceinline__ void add_range(const Element* tile, int end, std::int32_t columns) {
#pragma unroll 1
    for (int column = first_column; column < end; column += kStep) {
      add_columns<kStep>(tile, column, columns);
    }
  }

  // Adds kCount columns from `column` on.
  template <int kCount>
  __device__ __forceinline__ void add_columns(const Element* tile, int column,
                                              std::int32_t columns) {
    float scores[kCount / 8][4] = {};
    multiply_keys(tile, column, scores);
    scale_and_cap(scores);
    if (columns - column < kCount) hide(scores, columns - column);
    weigh(scores);
    multiply_values(tile + Shape::kColumns * Shape::kHeadDim, column, scores);
  }

  // scores = Q·Kᵀ. scores[n] has the columns from 8n on: see warp_products.cuh.
  template <int kScores>
  __device__ __forceinline__ void multiply_keys(const Element* keys, int column,
                                                float (&scores)[kScores][4]) const {
    const int row = column + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 16; ++i) {
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        std::uint32_t key[4];
        load_matrices<false>(key, keys + place<Shape::kHeadDim>(row + 8 * n, 2 * i + lane / 8 % 2));
        multiply_add<Element>(scores[n], query[i], key[0], key[1]);
        multiply_add<Element>(scores[n + 1], query[i], key[2], key[3]);
      }
    }
  }

  template <int kScores>
  __device__ __forceinline__ void scale_and_cap(float (&scores)[kScores][4]) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] *= a.scale;
        if (a.soft_cap != 0) scores[n][e] = a.soft_cap * tanhf(scores[n][e]);
      }
    }
  }

  template <int kScores>
  __device__ __forceinline__ void hide(float (&scores)[kScores][4], std::int32_t columns) const {
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (8 * n + lane % 4 * 2 + e % 2 >= columns) scores[n][e] = -kInfinity;
      }
    }
  }

  // Replaces scores by their weights relative to the new maximum, and rescales what the warp has to
  // that maximum (Milakov & Gimelshein 2018).
  template <int kScores>
  __device__ __forceinline__ void weigh(float (&scores)[kScores][4]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -kInfinity;
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
        largest = fmaxf(largest, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      }
      const float before = maximum[h];
      maximum[h] = fmaxf(before, quad_max(largest));
      factor[h] = exp2_fast(before - maximum[h]);
      sum[h] *= factor[h];
#pragma unroll
      for (int n = 0; n < kScores; ++n) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          scores[n][e] = exp2_fast(scores[n][e] - maximum[h]);
          sum[h] += scores[n][e];
        }
      }
    }
    if (!__any_sync(kAll, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < kOutputs / 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[n][e] *= factor[e / 2];
    }
  }

  // output += weights · V.
  template <int kScores>
  __device__ __forceinline__ void multiply_values(const Element* values, int column,
                                                  const float (&weights)[kScores][4]) {
    const int row = column + lane % 16;
#pragma unroll
    for (int n = 0; n < kScores; n += 2) {
      const std::uint32_t left[4] = {pack<Element>(weights[n][0], weights[n][1]),
                                     pack<Element>(weights[n][2], weights[n][3]),
                                     pack<Element>(weights[n + 1][0], weights[n + 1][1]),
                                     pack<Element>(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
      for (int i = 0; i < Shape::kValueDim / 16; ++i) {
        std::uint32_t value[4];
        load_matrices<true>(value,
                            values + place<Shape::kValueDim>(row + 8 * n, 2 * i + lane / 16));
        multiply_add<Element>(output[2 * i], left, value[0], value[1]);
        multiply_add<Element>(output[2 * i + 1], left, value[2], value[3]);
      }
    }
  }

  // Writes a part: what the warps have, in `space` first, then their sum in global memory.
  __device__ __forceinline__ void finish(std::int64_t part, float* space) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      const float all = quad_sum(sum[h]);
      if (lane % 4 == 0) shared.weights[warp][row] = make_float2(maximum[h], all);
      float* const to = space + (warp * kRows + row) * Shape::kValueDim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kOutputs / 4; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n) =
            make_float2(output[n][2 * h], output[n][2 * h + 1]);
      }
    }
    __syncthreads();
    const int vectors = a.value_dim / 4;
    for (int index = static_cast<int>(threadIdx.x); index < a.rows * vectors;
         index += Shape::kThreads) {
      const int row = index / vectors;
      const int dim = (index - row * vectors) * 4;
      float high = -kInfinity;
      for_warps_with(row, [&](int w) { high = fmaxf(high, shared.weights[w][row % kRows].x); });
      float total = 0;
      float4 values = {};
      for_warps_with(row, [&](int w) {
        const float2 weight = shared.weights[w][row % kRows];
        const float factor = exp2_fast(weight.x - high);
        total = fmaf(factor, weight.y, total);
        const float4 own = *reinterpret_cast<const float4*>(
            space + (w * kRows + row % kRows) * Shape::kValueDim + dim);
        values.x = fmaf(factor, own.x, values.x);
        values.y = fmaf(factor, own.y, values.y);
        values.z = fmaf(factor, own.z, values.z);
        values.w = fmaf(factor, own.w, values.w);
      });
      const std::int64_t at = part * a.rows + row;
      *reinterpret_cast<float4*>(a.part_outputs + at * a.value_dim + dim) = values;
      if (dim == 0) a.part_weights[at] = make_float2(high, total);
    }
  }

  template <class Visit>
  __device__ __forceinline__ void for_warps_with(int row, const Visit& visit) const {
    for (int w = row / kRows; w < Shape::kWarps; w += team_warps) visit(w);
  }

  const DecodeArguments& a;
  DecodeShared<Shape>& shared;
  int warp, lane;
  int team_warps;
  int first_row;     // of the warp
  int first_column;  // of the team, in a tile
  Source source;

  // See warp_products.cuh; index h is that of the rows lane / 4 and lane / 4 + 8.
  std::uint32_t query[Shape::kHeadDim / 16][4];
  float output[kOutputs / 4][4];
  float maximum[2];  // of the logits, in units of log 2
  float sum[2];      // this thread's share of the row's
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    decode(const __grid_constant__ DecodeArguments arguments) {
  hopper::allow_next_kernel();
  extern __shared__ __align__(128) unsigned char bytes[];
  Decoder<Shape>(arguments, *reinterpret_cast<DecodeShared<Shape>*>(bytes)).run();
}

template <class Shape>
DecodeKernel kernel_of() {
  void (*const function)(DecodeArguments) = &decode<Shape>;
  return {reinterpret_cast<const void*>(function), Shape::kColumns, Shape::kThreads,
          sizeof(DecodeShared<Shape>)};
}

}  // namespace annulus::flash::decode
