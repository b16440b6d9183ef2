#pragma once

#include <cstdint>

#include "flash/float32/backward/tiles.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash::backward {

/// Computes the gradients of a tile of keys or queries in plain float32, as the forward pass does.
/// For each passing tile, it computes S and dP, and adds the products of dS (for keys, also of P)
/// and the passing rows to sums. The sums stay in registers until the end, so their order does not
/// vary.
///
/// A thread computes scores of 8 own rows and 4 passing rows, and the sums of these 8 rows in 4
/// dims. The 16 threads that share rows are every other lane of a warp.
template <class Tiles, bool kOfKeys>
class TileGradients {
  static constexpr int kDims = Tiles::kDims;
  static constexpr int kPassing = Tiles::kPassing;
  static constexpr int kTile = kFloat32Tile;
  static constexpr int kOwnRows = float32::kOwnRows;
  static constexpr int kOtherRows = float32::kOtherRows;
  static constexpr int kRecord = kTile + kFlagValues;
  using Numbers = float32::Scores;
  using Memory = Float32Memory<Tiles>;

 public:
  __device__ __forceinline__ TileGradients(const Arguments& arguments, const Float32Operands& of,
                                           Memory& shared)
      : a(arguments), operands(of), memory(shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    first_own = (warp % 4 * 2 + lane % 2) * kOwnRows;
    first_other = lane / 2 * kOtherRows;
    group = warp / 4;
  }

  template <class Walk>
  __device__ __forceinline__ void run(Walk& walk) {
    bool more = true;
    const auto fetch = [&](Step(&steps)[kPassing]) {
      if (threadIdx.x != 0) return;
      for (Step& step : steps) {
        more = more && walk.next(step);
        if (!more) step.tile = -1;
      }
    };
    fetch(memory.step[0]);
    __syncthreads();
    if (memory.step[0][0].tile < 0) return;
    copy_own();
    copy_passing(0, memory.step[0]);
    copy_passing(1, memory.step[0]);
    Numbers score_sum = {}, weight_sum = {};
    bool last = false;
    for (int at = 0; !last; at ^= 1) {
      const Step(&steps)[kPassing] = memory.step[at];
      const Step(&next)[kPassing] = memory.step[at ^ 1];
      async_wait<kOfKeys ? 1 : 0>();  // waits for the first tensor; for dQ, it is copied second
      __syncthreads();
      fetch(memory.step[at ^ 1]);
      const std::uint32_t masked = masked_tiles(steps);
      const int tiles = steps[kPassing - 1].tile < 0 ? 1 : kPassing;
      const bool computes = group < tiles;
      const std::uint32_t hidden =
          computes && (masked >> group & 1U) != 0 ? find_hidden(steps[group]) : 0;
      Numbers weights, derived;
      if (computes) {
        multiply(weights, 0, operands.query.dim);
        weigh(weights, derived);
      }
      if constexpr (kOfKeys) {
        async_wait<0>();
        __syncthreads();
      }
      if (computes) {
        Numbers scores;
        multiply(scores, 1, operands.value.dim);
        differentiate(scores, derived);
        store(scores, hidden, (masked >> group & 1U) != 0);
      }
      __syncthreads();
      last = next[0].tile < 0;
      if constexpr (!kOfKeys) {
        if (!last) copy_passing(1, next);
        add_products(score_sum, 0, tiles, masked, operands.query.dim);
        __syncthreads();
        if (!last) copy_passing(0, next);
      } else {
        if (a.grad_key.data != nullptr) {
          add_products(score_sum, 0, tiles, masked, operands.query.dim);
        }
        __syncthreads();
        if (!last) copy_passing(0, next);
        if (computes) store(weights, hidden, (masked >> group & 1U) != 0);
        __syncthreads();
        if (a.grad_value.data != nullptr) {
          add_products(weight_sum, 1, tiles, masked, operands.value.dim);
        }
        __syncthreads();
        if (!last) copy_passing(1, next);
      }
    }
    if constexpr (kOfKeys) {
      add(a.grad_key, score_sum);
      add(a.grad_value, weight_sum);
    } else {
      add(a.grad_query, score_sum);
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::int32_t batch() const {
    return kOfKeys ? memory.work.batch : memory.rows.batch;
  }
  [[nodiscard]] __device__ __forceinline__ std::int32_t own_head() const {
    return kOfKeys ? memory.work.kv_head : memory.rows.head;
  }
  [[nodiscard]] __device__ __forceinline__ std::int32_t first_token() const {
    return kOfKeys ? memory.work.first_column : memory.rows.tile * kTile;
  }

  // Copies a tile of a tensor of `rows` rows to place(row, quad).
  template <class Place>
  __device__ __forceinline__ void copy_tile(const RowTensor& tensor, std::int32_t head,
                                            std::int32_t first_row, std::int32_t rows,
                                            const Place& place) const {
    float32::copy_rows<kDims, Tiles::kThreads>(
        static_cast<const float*>(tensor.data) + batch() * tensor.strides.batch +
            head * tensor.strides.head + std::int64_t{first_row} * tensor.strides.sequence,
        tensor.strides.sequence, rows - first_row, tensor.dim, place);
  }

  __device__ __forceinline__ void copy_own() const {
    for (int tensor = 0; tensor < 2; ++tensor) {
      const RowTensor& keys = tensor == 0 ? operands.key : operands.value;
      const RowTensor& queries = tensor == 0 ? operands.query : operands.grad_output;
      copy_tile(kOfKeys ? keys : queries, own_head(), first_token(), kOfKeys ? a.columns : a.rows,
                [&](unsigned row, unsigned quad) { return memory.own[tensor].at(row) + 4 * quad; });
    }
    if constexpr (!kOfKeys) {
      copy_lse(0, own_head(), memory.rows.tile);
      copy_delta(0, own_head(), memory.rows.tile);
    }
  }

  // Copies the first or second tensor of the passing tiles, as its own group of asynchronous
  // copies.
  __device__ __forceinline__ void copy_passing(int tensor, const Step (&steps)[kPassing]) const {
#pragma unroll
    for (int i = 0; i < kPassing; ++i) {
      const std::int32_t tile = steps[i].tile;
      if (tile < 0) continue;
      const auto place = [&](unsigned row, unsigned quad) {
        return memory.passing[tensor][i].at(row, quad);
      };
      if constexpr (kOfKeys) {
        copy_tile(tensor == 0 ? operands.query : operands.grad_output, steps[i].head, tile * kTile,
                  a.rows, place);
        if (tensor == 0) {
          copy_lse(i, steps[i].head, tile);
        } else {
          copy_delta(i, steps[i].head, tile);
        }
      } else {
        copy_tile(tensor == 0 ? operands.key : operands.value, own_head() / a.heads_per_kv_head,
                  tile * kTile, a.columns, place);
      }
    }
    async_commit();
  }

  [[nodiscard]] __device__ __forceinline__ std::int64_t record(std::int32_t head,
                                                               std::int32_t tile) const {
    return (std::int64_t{batch()} * a.heads + head) * (a.padded_rows / kTile) + tile;
  }
  __device__ __forceinline__ void copy_lse(int place, std::int32_t head, std::int32_t tile) const {
    const int quad = 4 * static_cast<int>(threadIdx.x);
    if (quad >= kRecord) return;
    async_copy(memory.lse[place] + quad, a.scaled_lse + record(head, tile) * kRecord + quad, true);
  }
  __device__ __forceinline__ void copy_delta(int place, std::int32_t head,
                                             std::int32_t tile) const {
    const int quad = 4 * static_cast<int>(threadIdx.x);
    if (quad >= kTile) return;
    async_copy(memory.delta[place] + quad, a.padded_delta + record(head, tile) * kTile + quad,
               true);
  }

  // Bit i: some pair of passing tile i may be hidden.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t masked_tiles(
      const Step (&steps)[kPassing]) const {
    std::uint32_t masked = 0;
#pragma unroll
    for (int i = 0; i < kPassing; ++i) {
      bool is = steps[i].masked != 0;
      if constexpr (kOfKeys) {
        is = is || (__float_as_int(memory.lse[i][kTile]) & kHiddenRows) != 0;
      }
      if (is) masked |= 1U << i;
    }
    return masked;
  }

  // Bit 4i + j: own row i and passing row j do not see each other.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_hidden(const Step& step) const {
    constexpr int kQueries = kOfKeys ? kOtherRows : kOwnRows;
    constexpr int kKeys = kOfKeys ? kOwnRows : kOtherRows;
    const std::int32_t own = first_token() + first_own, other = step.tile * kTile + first_other;
    const std::int32_t query = kOfKeys ? other : own, key = kOfKeys ? own : other;
    const auto bits_of = [&](const auto& sees_of_query) {
      std::uint32_t bits = 0;
#pragma unroll 1
      for (int q = 0; q < kQueries; ++q) {
        const auto sees = sees_of_query(query + q);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
          if (!sees(key + k)) bits |= 1U << (kOfKeys ? 4 * k + q : 4 * q + k);
        }
      }
      return bits;
    };
    const auto has_weight = [&](std::int32_t row) {
      return !kOfKeys || memory.lse[group][row - step.tile * kTile] != kInfinity;
    };
    if (a.mask.key_tiles > 0) {
      return bits_of([&](std::int32_t row) {
        const bool has = has_weight(row);
        return [&, has, keys = ListedRow(a, batch(), kTile, row)](std::int32_t column) {
          return has && keys.sees(a, batch(), step.head, listed_column(a, batch(), kTile, column));
        };
      });
    }
    const std::int32_t columns =
        a.column_lengths == nullptr ? a.columns : a.column_lengths[batch()];
    return bits_of([&](std::int32_t row) {
      const bool has = has_weight(row);
      return [&, has, row](std::int32_t column) {
        const std::int32_t distance = column - row;
        return has && column < columns && distance >= a.low && distance <= a.high;
      };
    });
  }

  // product = own·passingᵀ, of the first or second tensors.
  __device__ __forceinline__ void multiply(Numbers& product, int tensor, int dims) const {
    float32::multiply_rows<kDims>(
        product, memory.own[tensor].at(first_own),
        [&](unsigned quad) { return memory.passing[tensor][group].at(first_other, quad); }, dims);
  }

  // Replaces scores by weights; `derived` are the weights times the derivative of the soft cap.
  __device__ __forceinline__ void weigh(Numbers& scores, Numbers& derived) const {
    const float unit = a.soft_cap != 0 ? a.soft_cap : a.scale;
    if (a.soft_cap != 0) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOtherRows; ++j) {
          const float x = scores[i][j] * a.tanh_scale;
          // 1/cosh² is precise even where 1 − tanh² is small.
          const float e = exp2_fast(-2 * kLog2E * fabsf(x));
          derived[i][j] = 4 * e / ((1 + e) * (1 + e));
          scores[i][j] = tanhf(x);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOtherRows; ++j) derived[i][j] = 1;
      }
    }
    float lse[kOfKeys ? kOtherRows : kOwnRows];
    load_row_values(lse, memory.lse[kOfKeys ? group : 0]);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) {
        // The LSE is natural: in units of log 2, it would be rounded once more.
        scores[i][j] = exp2_fast(fmaf(scores[i][j], unit, -lse[kOfKeys ? j : i]) * kLog2E);
        derived[i][j] *= scores[i][j];
      }
    }
  }

  // Replaces dP by dS times the scale of the logits.
  __device__ __forceinline__ void differentiate(Numbers& grads, const Numbers& derived) const {
    float delta[kOfKeys ? kOtherRows : kOwnRows];
    load_row_values(delta, memory.delta[kOfKeys ? group : 0]);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int j = 0; j < kOtherRows; ++j) {
        grads[i][j] = derived[i][j] * (a.scale * (grads[i][j] - delta[kOfKeys ? j : i]));
      }
    }
  }

  // The values of this thread's queries.
  template <int kCount>
  __device__ __forceinline__ void load_row_values(float (&to)[kCount], const float* from) const {
    from += kOfKeys ? first_other : first_own;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 quad = float32::load_quad(from + i);
      to[i] = quad.x;
      to[i + 1] = quad.y;
      to[i + 2] = quad.z;
      to[i + 3] = quad.w;
    }
  }

  __device__ __forceinline__ void store(Numbers& weights, std::uint32_t hidden, bool masked) const {
    if (masked) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
        for (int j = 0; j < kOtherRows; ++j) {
          weights[i][j] =
              (hidden >> (4 * i + j) & 1U) != 0 ? float32::kHiddenWeight : weights[i][j] + 0.0F;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      float32::store_quad(memory.weights[group].at(first_own + i) + first_other, weights[i][0],
                          weights[i][1], weights[i][2], weights[i][3]);
    }
  }

  // sums += weights·passing, in this thread's dims. The products of these tiles are added up
  // separately first, since rounding grows with the number of terms.
  __device__ __forceinline__ void add_products(Numbers& sums, int tensor, int tiles,
                                               std::uint32_t masked, int dims) const {
    if (64 * group >= dims) return;
    float products[kOwnRows][1][4] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      if ((masked >> tile & 1U) != 0) {
        add_tile<true>(products, tensor, tile);
      } else {
        add_tile<false>(products, tensor, tile);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int d = 0; d < 4; ++d) sums[i][d] += products[i][0][d];
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void add_tile(float (&products)[kOwnRows][1][4], int tensor,
                                           int tile) const {
    const unsigned quad = 16 * group + first_other / 4;
    float32::add_weighted_rows<kDims, kMasked>(
        products, memory.weights[tile].at(first_own),
        [&](unsigned row) { return memory.passing[tensor][tile].at(row, quad); });
  }

  // Adds the sums to the gradient, if it is wanted.
  __device__ __forceinline__ void add(const Gradient& to, const Numbers& sums) const {
    const int dim = 64 * group + first_other;
    if (to.data == nullptr || dim >= to.dim) return;
    const std::int32_t end = kOfKeys ? memory.work.columns : a.rows;
    float* const first = to.data + batch() * to.strides.batch + own_head() * to.strides.head + dim;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const std::int32_t token = first_token() + first_own + i;
      if (token >= end || (!kOfKeys && memory.lse[0][first_own + i] == kInfinity)) continue;
      auto* const quad = reinterpret_cast<float4*>(first + token * to.strides.sequence);
      const float4 before = __ldcg(quad);
      *quad = make_float4(before.x + sums[i][0], before.y + sums[i][1], before.z + sums[i][2],
                          before.w + sums[i][3]);
    }
  }

  const Arguments& a;
  const Float32Operands& operands;
  Memory& memory;
  int first_own;    // of this thread's own rows
  int first_other;  // of its passing rows, and of its dims among 64
  int group;  // of 128 threads, with the scores of this passing tile and the sums of these 64 dims
};

}  // namespace annulus::flash::backward
