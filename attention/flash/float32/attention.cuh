#pragma once

#include "flash/float32/shape.cuh"
#include "flash/softmax.cuh"
#include "flash/visible.cuh"

namespace annulus::flash::float32 {

/// Flash attention of one item in plain float32: no tensor cores, whose products are rounded to
/// fewer bits. Logits are in units of log 2.
///
/// The copies of a tile's values run beside its first product, and the copies of the next tile's
/// keys run beside the softmax and the second product. Several thread blocks share a
/// multiprocessor, which hides the waits for copies and barriers.
template <int kDims>
class Attention {
  static constexpr int kParts = kDims / 64;  // of the output: 64 dimensions each
  // Parts that are summed at a time. Two parts take fewer loads for each product, if registers
  // suffice.
  static constexpr int kPartsAtOnce = kDims == 128 ? 2 : 1;
  static constexpr unsigned kAll = 0xffffffff;

 public:
  __device__ __forceinline__ Attention(const Arguments& arguments, const Operands& operands,
                                       Shared<kDims>& memory)
      : a(arguments), t(operands), shared(memory), item(memory.item) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    half = lane % 2;
    own = lane / 2;
    first_row = (static_cast<int>(threadIdx.x) / 32 * 2 + half) * kOwnRows;
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) load_row(i);
    if (item.tile.segments > 0) attend();
    store();
  }

 private:
  // The state of row i so far, or the empty one.
  __device__ __forceinline__ void load_row(int i) {
    shift[i] = -kLargest;  // finite, so that logits of −∞ have weight 0 beside it
    sum[i] = 0;
#pragma unroll
    for (int d = 0; d < 4 * kParts; ++d) output[i][d] = 0;
    const std::int32_t row = first_row + i;
    if (a.state.output == nullptr || row >= item.tile.rows) return;
    const double lse = load_lse(a.state, result_row(item, row)) * kLog2E64;
    if (lse == -kInfinity) return;
    shift[i] = static_cast<float>(lse);
    const float weight = exp2f(static_cast<float>(lse - shift[i]));
    if (own == 0) sum[i] = weight;  // one of the threads that share the row adds it
    const float* const from =
        static_cast<const float*>(a.state.output) + output_offset(a.state, result_row(item, row));
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int dim = 64 * p + 4 * own;
      if (dim >= a.value_dim) continue;
      const float4 quad = load_quad(from + dim);
      output[i][4 * p] = weight * quad.x;
      output[i][4 * p + 1] = weight * quad.y;
      output[i][4 * p + 2] = weight * quad.z;
      output[i][4 * p + 3] = weight * quad.w;
    }
  }

  // Adds the contributions of the item's key tiles. There is at least one.
  __device__ __forceinline__ void attend() {
    const KeySegment* segment = a.segments + item.tile.first_segment;
    const KeySegment* const end = segment + item.tile.segments;
    std::int32_t begin = (segment->tiles - 1) * kTileRows;
    copy_queries();
    copy_keys(segment->first_column + begin);
    async_commit();
    do {
      async_wait<0>();
      __syncthreads();  // the keys have arrived; no thread reads the last tile's values any more
      copy_values(segment->first_column + begin);
      async_commit();
      Scores scores;
      multiply_keys(scores);
      __syncthreads();  // no thread reads the keys any more
      const KeySegment& at = *segment;
      const std::int32_t at_begin = begin;
      begin -= kTileRows;
      if (begin < 0 && ++segment != end) begin = (segment->tiles - 1) * kTileRows;
      if (segment != end) copy_keys(segment->first_column + begin);
      async_commit();
      scale_and_cap(scores);
      float factor[kOwnRows];
      if (at.flags & KeySegment::kMasked) {
        const std::uint32_t hidden = hide(scores, at, at_begin);
        weigh<true>(scores, hidden, factor);
        values_arrive();
        multiply_values<true>(factor);
      } else {
        weigh<false>(scores, 0, factor);
        values_arrive();
        multiply_values<false>(factor);
      }
    } while (segment != end);
  }

  __device__ __forceinline__ static void values_arrive() {
    async_wait<1>();  // does not wait for the next tile's keys
    __syncthreads();
  }

  __device__ __forceinline__ void copy_queries() const {
    const Strides& s = t.query_strides;
    copy_rows<kDims, kThreads>(
        static_cast<const float*>(t.query) + item.batch * s.batch + item.head * s.head +
            item.tile.first_row * s.sequence,
        s.sequence, item.tile.rows, t.head_dim,
        [this](unsigned row, unsigned quad) { return shared.query.at(row) + 4 * quad; });
  }
  __device__ __forceinline__ void copy_keys(std::int32_t column) const {
    copy_rows<kDims, kThreads>(
        kv_row(t.key, t.key_strides, column), t.key_strides.sequence, a.columns - column,
        t.head_dim, [this](unsigned row, unsigned quad) { return shared.key.at(row, quad); });
  }
  __device__ __forceinline__ void copy_values(std::int32_t column) const {
    copy_rows<kDims, kThreads>(
        kv_row(t.value, t.value_strides, column), t.value_strides.sequence, a.columns - column,
        a.value_dim,
        [this](unsigned row, unsigned quad) { return shared.value + row * kDims + 4 * quad; });
  }
  [[nodiscard]] __device__ __forceinline__ const float* kv_row(const void* tensor, const Strides& s,
                                                               std::int32_t column) const {
    return static_cast<const float*>(tensor) + item.batch * s.batch +
           item.head / a.heads_per_kv_head * s.head + column * s.sequence;
  }

  // scores = Q·Kᵀ.
  __device__ __forceinline__ void multiply_keys(Scores& scores) const {
    multiply_rows<kDims>(
        scores, shared.query.at(first_row),
        [this](unsigned quad) { return shared.key.at(kOtherRows * own, quad); }, t.head_dim);
  }

  __device__ __forceinline__ void scale_and_cap(Scores& scores) const {
    const auto replace = [&scores](const auto& logit_of) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOtherRows; ++j) scores[i][j] = logit_of(scores[i][j]);
      }
    };
    if (a.soft_cap == 0) {
      replace([scale = a.scale * kLog2E](float x) { return scale * x; });
    } else {
      replace(
          [scale = a.scale, cap = a.soft_cap * kLog2E](float x) { return cap * tanhf(scale * x); });
    }
  }

  // Sets the scores of hidden pairs to −∞, in the tile that begins at column `begin` of a masked
  // segment. Bit kOtherRows · i + j of the result: scores[i][j] is hidden.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t hide(Scores& scores,
                                                              const KeySegment& segment,
                                                              std::int32_t begin) const {
    // The threads that share rows find the visible columns of one row each.
    const std::int32_t row = first_row + own % kOwnRows;
    const ColumnSpan span = visible_columns(a, item, segment, row);
    const bool asks_ids = a.row_ids != nullptr;
    const std::int32_t row_id = asks_ids ? row_id_of(a, item, row) : 0;
    const std::int32_t first_column = begin + kOtherRows * own;
    const std::int32_t* const ids =
        asks_ids ? column_ids_of(a, item, segment) + first_column : nullptr;
    std::uint32_t hidden = 0;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const std::int32_t first = __shfl_sync(kAll, span.first, lane_of_row(i)) - first_column;
      const std::int32_t last = __shfl_sync(kAll, span.last, lane_of_row(i)) - first_column;
      const std::int32_t id = __shfl_sync(kAll, row_id, lane_of_row(i));
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) {
        if (j >= first && j <= last && (!asks_ids || ids[j] == id)) continue;
        scores[i][j] = -kInfinity;
        hidden |= 1U << (kOtherRows * i + j);
      }
    }
    return hidden;
  }

  // The lane that has found the visible columns of row i, among the lanes that share the row.
  [[nodiscard]] __device__ __forceinline__ int lane_of_row(int i) const {
    return 2 * i + half;
  }

  // Writes the weights of the scores relative to the new maximum. Earlier results must be
  // multiplied by `factor` (Milakov & Gimelshein 2018).
  template <bool kMasked>
  __device__ __forceinline__ void weigh(const Scores& scores, std::uint32_t hidden,
                                        float (&factor)[kOwnRows]) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      float largest = shift[i];
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) largest = fmaxf(largest, scores[i][j]);
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, distance));
      }
      factor[i] = exp2_fast(shift[i] - largest);
      shift[i] = largest;
      float weight[kOtherRows];
      float total = 0;
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) {
        weight[j] = exp2_fast(scores[i][j] - largest);
        total += weight[j];
        if (kMasked && (hidden >> (kOtherRows * i + j) & 1U) != 0) weight[j] = kHiddenWeight;
      }
      sum[i] = fmaf(sum[i], factor[i], total);
      store_quad(shared.weights.at(first_row + i) + kOtherRows * own, weight[0], weight[1],
                 weight[2], weight[3]);
    }
  }

  // output = output · factor + weights·V. The tile's products are added up separately first, since
  // rounding grows with the number of terms.
  template <bool kMasked>
  __device__ __forceinline__ void multiply_values(const float (&factor)[kOwnRows]) {
#pragma unroll
    for (int p = 0; p < kParts; p += kPartsAtOnce) {
      if (64 * p >= a.value_dim) break;
      const float* const weights = shared.weights.at(first_row);
      const float* const value = shared.value + 64 * p + 4 * own;
      float tile[kOwnRows][kPartsAtOnce][4] = {};
      add_weighted_rows<kDims, kMasked>(tile, weights,
                                        [value](int row) { return value + row * kDims; });
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int d = 0; d < 4 * kPartsAtOnce; ++d) {
          float& kept = output[i][4 * p + d];
          kept = fmaf(kept, factor[i], tile[i][d / 4][d % 4]);
        }
      }
    }
  }

  __device__ __forceinline__ void store() {
    float own_sum = 0;
    float own_shift = 0;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      // Full tiles also added to rows past a length.
      if (first_row + i >= item.tile.live_rows) load_row(i);
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2) {
        sum[i] += __shfl_xor_sync(kAll, sum[i], distance);
      }
      if (own == i) {
        own_sum = sum[i];
        own_shift = shift[i];
      }
    }
    __syncwarp();  // state and result may share memory, here and below
    // Each of the threads that share rows finishes one row.
    const std::int32_t own_row = first_row + own;
    float own_factor = 0;
    if (own < kOwnRows && own_row < item.tile.rows) {
      double lse = -kInfinity;
      if (own_sum != 0) {
        own_factor = 1.0f / own_sum;
        lse = (own_shift + log2(static_cast<double>(own_sum))) / kLog2E64;
      } else if (saw_without_weight(a, item, own_row)) {
        own_factor = kNan;
      }
      store_lse(a.result, result_row(item, own_row), lse);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const float factor = __shfl_sync(kAll, own_factor, lane_of_row(i));
      const std::int32_t row = first_row + i;
      if (row >= item.tile.rows) continue;
      float* const to =
          static_cast<float*>(a.result.output) + output_offset(a.result, result_row(item, row));
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const int dim = 64 * p + 4 * own;
        if (dim >= a.value_dim) continue;
        store_quad(to + dim, output[i][4 * p] * factor, output[i][4 * p + 1] * factor,
                   output[i][4 * p + 2] * factor, output[i][4 * p + 3] * factor);
      }
    }
  }

  static constexpr double kLog2E64 = 1.4426950408889634;

  const Arguments& a;
  const Operands& t;
  Shared<kDims>& shared;
  const Item& item;
  int half;       // 0 or 1: the thread's group of rows, of the warp's two
  int own;        // the thread's number among the threads that share rows
  int first_row;  // the thread's first row in the tile
  float output[kOwnRows][4 * kParts];
  float shift[kOwnRows];  // the largest logit so far
  float sum[kOwnRows];    // this thread's share of the row's weights, relative to shift
};

}  // namespace annulus::flash::float32
