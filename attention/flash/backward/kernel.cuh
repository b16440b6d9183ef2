#pragma once

#include "flash/backward/arguments.hpp"
#include "flash/backward/dropout.cuh"
#include "flash/backward/gradient.cuh"
#include "flash/backward/kernels.hpp"
#include "flash/backward/pair_bits.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/score_preparation.cuh"
#include "flash/backward/scores.cuh"
#include "flash/backward/soft_cap.cuh"
#include "flash/backward/special.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/backward/walk.cuh"
#include "flash/hopper/tma.cuh"
#include "flash/hopper/wgmma.cuh"
#include "flash/shared.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash::backward {

/// One warpgroup's part: dK and dV of 64 keys, in registers until all queries of the group of heads
/// have been seen, and half of each query tile's dQ.
template <class Tiles>
class Consumer {
  using Element = typename Tiles::Element;
  static constexpr bool kLists = Tiles::kPairs != PairClass::band;
  static constexpr bool kGeneral = Tiles::kGeneral;
  static constexpr bool kSoftCap = Tiles::kSoftCap;
  static constexpr int kScores = Tiles::kQueries / 2;
  static constexpr int kSums = Tiles::kDim / 2;
  static constexpr bool kSplitsDims = Tiles::kSplitsDims;
  static constexpr bool kSplitsKeys = Tiles::kSplitsKeys;
  // Named barriers of both warpgroups, and then of each.
  static constexpr int kTileSync = 1;
  static constexpr int kSpecialSync = 2;
  static constexpr int kGroupSync = 3;
  static constexpr int kPairSync = 5;  // and three more, for each pair of warps
  // Calls of Philox that run at a time.
  static constexpr int kDraws = Tiles::kDim == 64 ? 4 : 2;
  using ScoreProduct = hopper::Product<Element, Tiles::kQueries>;
  using SumProduct = hopper::Product<Element, Tiles::kDim>;
  static constexpr int kSumWarps = Tiles::kSumWarps;
  using QueryProduct = hopper::Product<Element, 64>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& arguments, SharedTiles<Tiles>& memory)
      : a(arguments), work(memory.work), shared(memory) {
    warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32 - 4, 0);
    group = warp / 4;
    lane = static_cast<int>(threadIdx.x) % 32;
  }

  __device__ __forceinline__ void run() {
    float key_sum[kSums], value_sum[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) key_sum[i] = value_sum[i] = 0;
    shared.key_full.wait(0);
    while (at.count < static_cast<std::uint32_t>(shared.steps)) step(key_sum, value_sum);
    add(a.grad_key, key_sum, Tiles::sum_scale(a));
    add(a.grad_value, value_sum, kGeneral ? a.value_scale : 1);
  }

 private:
  // product = A·Bᵀ of this warpgroup's 64 keys and a tile of rows.
  __device__ __forceinline__ void issue_scores(float (&product)[kScores], const Element* keys,
                                               const Element* rows) const {
    const std::uint64_t left = hopper::operand_descriptor(keys + group * 64 * 64);
    const std::uint64_t right = hopper::operand_descriptor(rows);
#pragma unroll
    for (int dim = 0; dim < Tiles::kDim; dim += 16) {
      const std::uint32_t inside = dim % 64 * 2;
      const std::uint64_t l = hopper::advance(left, dim / 64 * (Tiles::kKeys * 128) + inside);
      const std::uint64_t r = hopper::advance(right, dim / 64 * (Tiles::kQueries * 128) + inside);
      if (dim == 0) {
        ScoreProduct::template shared_times_shared<false>(product, l, r);
      } else {
        ScoreProduct::template shared_times_shared<true>(product, l, r);
      }
    }
    hopper::products_commit();
  }

  // sum += weights·rows.
  __device__ __forceinline__ static void issue_sum(float (&sum)[kSums],
                                                   const std::uint32_t (&weights)[kScores / 2],
                                                   const Element* rows) {
    const std::uint64_t right = hopper::operand_descriptor(rows, Tiles::kQueries * 128);
#pragma unroll
    for (int row = 0; row < Tiles::kQueries; row += 16) {
      const int i = row / 4;
      SumProduct::registers_times_shared(sum, weights[i], weights[i + 1], weights[i + 2],
                                         weights[i + 3], hopper::advance(right, row * 128), 1);
    }
    hopper::products_commit();
  }

  // This warpgroup's 64 × 64 part of dQᵀ = Kᵀ·dSᵀ: half of the dims, of the queries or of the keys.
  // Its threads then hold neighbouring dims, which lie in different banks.
  __device__ __forceinline__ void issue_query(float (&sum)[32], const Element* grad_score) const {
    constexpr int kKeys = kSplitsKeys ? 64 : Tiles::kKeys;
    const std::uint64_t left = hopper::operand_descriptor(
        shared.key + (kSplitsDims || kSplitsKeys ? group * kKeys * 64 : 0));
    const std::uint64_t right =
        hopper::operand_descriptor(grad_score + (kSplitsDims ? 0 : group * kKeys * 64));
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      const std::uint64_t l = hopper::advance(left, key * 128);
      const std::uint64_t r = hopper::advance(right, key * 128);
      if (key == 0) {
        QueryProduct::template transposed_times_shared<false>(sum, l, r);
      } else {
        QueryProduct::template transposed_times_shared<true>(sum, l, r);
      }
    }
    hopper::products_commit();
  }

  // The warp's keys, and its shared memory before store_grad_scores(), which stores dS of these
  // keys there.
  [[nodiscard]] __device__ __forceinline__ WarpScores warp_scores() const {
    return {work.batch,
            shared.step[at.slot()].head,
            work.first_column + warp * 16,
            lane,
            reinterpret_cast<unsigned char*>(shared.grad_score[at.count % 2]) + warp * 16 * 128};
  }
  [[nodiscard]] __device__ __forceinline__ bool has_scores() const {
    return kGeneral && (a.scores.bias.data != nullptr || a.scores.mask.data != nullptr);
  }
  // Rows of a masked tile that the thread examines: lane, lane + 32, …
  using Rows = ListedRow[kLists ? Tiles::kQueries / 32 : 1];
  __device__ __forceinline__ void read_rows(Rows& rows, std::int32_t row) const {
#pragma unroll
    for (int i = 0; i < Tiles::kQueries / 32; ++i) {
      rows[i] = ListedRow(a, work.batch, Tiles::kQueries, row + 32 * i + lane);
    }
  }

  // Finds the pairs that a masked tile hides.
  __device__ __forceinline__ void find_hidden(const Rows& rows) const {
    const WarpScores of = warp_scores();
    auto* const hidden = reinterpret_cast<std::uint16_t*>(of.own + kFound);
    const ListedColumns columns(a, of, Tiles::kKeys);
#pragma unroll
    for (int i = 0; i < Tiles::kQueries / 32; ++i) {
      hidden[32 * i + lane] = static_cast<std::uint16_t>(~columns.seen_by(rows[i]));
    }
    __syncwarp();
  }

  // Bits of scores 32 · part + i in the warp's shared memory.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t bits_at(int of, int part = 0) const {
    return gather_bits(warp_scores().own + of + 128 * part, lane);
  }
  // Bit i: score 32 · part + i belongs to a hidden pair. If there is one part, the bits are found
  // before the wait for the scores; otherwise when they are needed, which takes fewer registers.
  static constexpr bool kFindsEarly = kLists && kScores == 32;
  [[nodiscard]] __device__ __forceinline__ std::uint32_t hidden_bits(int part) const {
    std::uint32_t hidden = 0;
    if (shared.step[at.slot()].masked != 0) hidden = bits_at(kFound, part);
    if constexpr (kGeneral) {
      if (a.scores.mask.data != nullptr) hidden |= bits_at(kMasked);
    }
    return hidden;
  }

  // Finds the pairs that the dense mask hides. A lane examines some rows.
  __device__ __forceinline__ void find_masked(std::int32_t row) const {
    const WarpScores of = warp_scores();
    auto* const hidden = reinterpret_cast<std::uint16_t*>(of.own + kMasked);
    if (shared.copies_mask != 0) {
      wait_for_bias();
      const auto& rows = shared.scores.bias[at.count % Tiles::kBiasStages];
#pragma unroll
      for (int r = lane; r < Tiles::kQueries; r += 32) {
        const std::uint32_t shown = set_of_16(*reinterpret_cast<const uint4*>(&rows[r][4 * warp]));
        hidden[r] = static_cast<std::uint16_t>(row + r < a.rows ? ~shown : ~0U);
      }
      pass_bias();
      return;
    }
#pragma unroll
    for (int r = lane; r < Tiles::kQueries; r += 32) {
      hidden[r] = static_cast<std::uint16_t>(
          hidden_by_mask(a, of.batch, of.head, row + r, of.column, shared.neighbours != 0));
    }
    __syncwarp();
  }

  // Bit i: score i drops. Two warps share the draws: each of their threads draws a row.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t draw_dropped(std::int32_t row) const {
    static_assert(kScores == 32 || !kGeneral);
    const WarpScores of = warp_scores();
    const int odd = warp % 2, r = 32 * odd + lane;
    const std::uint32_t bits = draw_row<kDraws>(
        a, {of.batch, of.head, row + r, of.column - 16 * odd}, shared.neighbours != 0);
    unsigned char* const even_keys = of.own - odd * 16 * 128;
    reinterpret_cast<std::uint16_t*>(even_keys + kDropped)[r] = static_cast<std::uint16_t>(bits);
    reinterpret_cast<std::uint16_t*>(even_keys + 16 * 128 + kDropped)[r] =
        static_cast<std::uint16_t>(bits >> 16U);
    hopper::named_sync(kPairSync + warp / 2, 64);
    return bits_at(kDropped);
  }

  // The entry of score 0 in the step's bias.
  [[nodiscard]] __device__ __forceinline__ float* bias_entries() const {
    return &shared.scores.bias[at.count % Tiles::kBiasStages][2 * (lane % 4)][warp * 16 + lane / 4];
  }
  // The distance from there to the entry of `score`.
  [[nodiscard]] __device__ __forceinline__ static constexpr int bias_distance(int score) {
    return (score / 4 * 8 + score % 2) * SharedScores<Tiles>::kPitch + score / 2 % 2 * 8;
  }
  // Releases the place of this step's bias: ScorePreparation adds the gradient that may lie there,
  // and copies the bias of a later step to it.
  __device__ __forceinline__ void pass_bias() const {
    __syncwarp();
    release(shared.scores.bias_read[at.count % Tiles::kBiasStages]);
  }
  __device__ __forceinline__ void wait_for_bias() const {
    shared.scores.bias_full[at.count % Tiles::kBiasStages].wait(at.count / Tiles::kBiasStages % 2);
  }

  // Turns products q·k into logits.
  __device__ __forceinline__ void add_bias(float (&scores)[kScores]) const {
    wait_for_bias();
    const float* const bias = bias_entries();
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = fmaf(scores[i], a.scale, bias[bias_distance(i)]);
    }
    if (a.grad_bias == nullptr) pass_bias();
  }

  // Overwrites the bias with its gradient.
  template <class Of>
  __device__ __forceinline__ void store_bias_gradient(Of of) const {
    float* const entries = bias_entries();
#pragma unroll
    for (int i = 0; i < kScores; ++i) entries[bias_distance(i)] = of(i);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    pass_bias();
  }

  // Consumes the bias or mask that ScorePreparation has copied for a step that is computed pair by
  // pair.
  __device__ __forceinline__ void skip_scores() const {
    if (a.scores.bias.data == nullptr && shared.copies_mask == 0) return;
    wait_for_bias();
    if (a.grad_bias == nullptr) {
      pass_bias();
    } else {
      store_bias_gradient([](int) { return 0.0F; });
    }
  }

  // Calls hide(i) for score i of each hidden pair.
  template <class Hide>
  __device__ __forceinline__ void for_hidden(std::int32_t row, std::uint32_t early,
                                             Hide hide) const {
    if constexpr (kLists) {
#pragma unroll
      for (int part = 0; part < kScores / 32; ++part) {
        const std::uint32_t hidden = kFindsEarly ? early : hidden_bits(part);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if ((hidden >> i & 1) != 0) hide(32 * part + i);
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::int32_t column =
            work.first_column + group * 64 + warp % 4 * 16 + lane / 4 + 8 * h;
        const std::int32_t distance = column - (row + 2 * (lane % 4));
        const std::int32_t low = column < work.columns ? a.low : 0x7fffffff;
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) {
          const std::int32_t x = distance - (i / 2 * 8 + i % 2);
          if (x < low || x > a.high) hide(i / 2 * 4 + 2 * h + i % 2);
        }
      }
    }
  }

  // True if some value that a masked tile's products read is special. All consumers ask. Where it
  // is true, Q and dO have arrived.
  [[nodiscard]] __device__ __forceinline__ bool is_special(std::int32_t flags) const {
    const std::uint32_t slot = at.slot();
    shared.key_watched.wait(0);
    if (has_scores()) {
      if ((flags & kSpecialValues) == 0 && shared.special_keys == 0) return false;
      shared.output_full[slot].wait(at.parity());
      return true;
    }
    shared.output_full[slot].wait(at.parity());
    constexpr int kCount = Tiles::kTileElements;
    const int thread = static_cast<int>(threadIdx.x) - 128;
    const bool special = (flags & kSpecialValues) != 0 || shared.special_keys != 0 ||
                         any_special<Element, 256>(shared.query[slot], kCount, thread) ||
                         any_special<Element, 256>(shared.grad_output[slot], kCount, thread);
    return any_of_threads<256>(kSpecialSync, special);
  }

  [[nodiscard]] __device__ __forceinline__ bool is_visible(std::int32_t row,
                                                           std::int32_t column) const {
    if constexpr (kGeneral) {
      const std::int32_t head = shared.step[at.slot()].head;
      const auto& [bias, mask, by_column] = a.scores;
      const auto entry = [&](const auto& tensor) {
        return tensor.data[offset_at(a, tensor.strides, work.batch, head, row, column)];
      };
      if (mask.data != nullptr && entry(mask) == 0) return false;
      if (bias.data != nullptr && entry(bias) == -kInfinity) return false;
    }
    if constexpr (kLists) {
      return ListedRow(a, work.batch, Tiles::kQueries, row)
          .sees(a, work.batch, shared.step[at.slot()].head,
                listed_column(a, work.batch, Tiles::kKeys, column));
    } else {
      return column < work.columns && column - row >= a.low && column - row <= a.high;
    }
  }

  // True if dropout drops a pair.
  [[nodiscard]] __device__ __forceinline__ bool drops(std::int32_t row, std::int32_t column) const {
    return cuda::drops(a.dropout, static_cast<std::uint32_t>(work.batch),
                       static_cast<std::uint32_t>(shared.step[at.slot()].head),
                       a.mask.row_positions[row], a.mask.column_positions[column]);
  }

  // The weight of a pair and its dS, by a warp.
  [[nodiscard]] __device__ __forceinline__ float2 differentiate_pair(std::int32_t first_row, int r,
                                                                     int k) const {
    const std::uint32_t slot = at.slot();
    float score = 0, grad = 0;
#pragma unroll
    for (int dim = 2 * lane; dim < Tiles::kDim; dim += 64) {
      const float2 q = swizzled_pair<Tiles::kQueries>(shared.query[slot], r, dim);
      const float2 g = swizzled_pair<Tiles::kQueries>(shared.grad_output[slot], r, dim);
      const float2 x = swizzled_pair<Tiles::kKeys>(shared.key, k, dim);
      const float2 v = swizzled_pair<Tiles::kKeys>(shared.value, k, dim);
      score = fmaf(q.x, x.x, fmaf(q.y, x.y, score));
      grad = fmaf(g.x, v.x, fmaf(g.y, v.y, grad));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      score += __shfl_xor_sync(0xffffffff, score, distance);
      grad += __shfl_xor_sync(0xffffffff, grad, distance);
    }
    float kept = 1;
    if constexpr (kGeneral) {
      const std::int32_t row = first_row + r, column = work.first_column + k;
      if (a.dropout.threshold != 0) kept = drops(row, column) ? 0 : 1;
      if (a.scores.bias.data != nullptr) {
        const std::int64_t offset =
            offset_at(a, a.scores.bias.strides, work.batch, shared.step[slot].head, row, column);
        score = fmaf(score, a.scale, a.scores.bias.data[offset]);
      }
    }
    grad = fmaf(grad, kept * grad_factor(), -shared.delta[slot][r]);
    float weight = 0;
    if (kSoftCap || (kGeneral && a.soft_cap != 0)) {
      const float tanh = tanh_of(a, score);
      weight = weight_of(tanh, capped_unit(), shared.lse[slot][r]);
      grad *= fmaf(-tanh, tanh, 1);
    } else {
      weight = weight_of(score, unit(), shared.lse[slot][r]);
    }
    return {kept * weight, weight * grad};
  }

  // Computes a tile pair by pair, since its hidden pairs must not even be multiplied by 0. First,
  // each row has a warp for dQ (or for a group's part of dQ), then each key has one, so that the
  // order of additions does not vary.
  __device__ __forceinline__ void differentiate_pairs(std::int32_t first_row) const {
    constexpr int kParts = Tiles::kDim / 64;
    const std::uint32_t slot = at.slot();
    if (a.grad_query.data != nullptr) {
      constexpr int kKeys = kSplitsKeys ? 64 : Tiles::kKeys;
      const int first_key = kSplitsKeys ? group * 64 : 0;
      wait_for_buffer();
#pragma unroll 1
      for (int r = kSplitsKeys ? warp % 4 : warp; r < Tiles::kQueries; r += kSumWarps) {
        float2 sum[kParts] = {};
#pragma unroll 1
        for (int k = first_key; k < first_key + kKeys; ++k) {
          if (shared.lse[slot][r] == kInfinity) break;
          if (!is_visible(first_row + r, work.first_column + k)) continue;
          const float grad = differentiate_pair(first_row, r, k).y;
#pragma unroll
          for (int i = 0; i < kParts; ++i) {
            const float2 x = swizzled_pair<Tiles::kKeys>(shared.key, k, 64 * i + 2 * lane);
            sum[i].x = fmaf(grad, x.x, sum[i].x);
            sum[i].y = fmaf(grad, x.y, sum[i].y);
          }
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const int dim = 64 * i + 2 * lane;
          const int pair = kSplitsDims ? dim / 32 : r / 64 * 2 + dim / 32;
          float* const to = sum_place(pair, r % 64, dim % 32);
          to[0] = Tiles::sum_scale(a) * sum[i].x;
          to[1] = Tiles::sum_scale(a) * sum[i].y;
        }
      }
      pass_buffer();
    }
#pragma unroll 1
    for (int k = warp; k < Tiles::kKeys; k += 8) {
      const std::int32_t column = work.first_column + k;
      float2 key_sum[kParts] = {}, value_sum[kParts] = {};
      bool any = false;
#pragma unroll 1
      for (int r = 0; r < Tiles::kQueries; ++r) {
        if (shared.lse[slot][r] == kInfinity || !is_visible(first_row + r, column)) continue;
        any = true;
        const float2 pair = differentiate_pair(first_row, r, k);
        if (kGeneral && a.grad_bias != nullptr && lane == 0) {
          const std::int64_t offset = offset_at(a, a.grad_bias_strides, work.batch,
                                                shared.step[slot].head, first_row + r, column);
          atomicAdd(a.grad_bias + offset, a.grad_bias_scale * pair.y);
        }
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float2 q = swizzled_pair<Tiles::kQueries>(shared.query[slot], r, 64 * i + 2 * lane);
          const float2 g =
              swizzled_pair<Tiles::kQueries>(shared.grad_output[slot], r, 64 * i + 2 * lane);
          key_sum[i].x = fmaf(pair.y, q.x, key_sum[i].x);
          key_sum[i].y = fmaf(pair.y, q.y, key_sum[i].y);
          value_sum[i].x = fmaf(pair.x, g.x, value_sum[i].x);
          value_sum[i].y = fmaf(pair.x, g.y, value_sum[i].y);
        }
      }
      if (!any) continue;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int dim = 64 * i + 2 * lane;
        add_at(a.grad_key, column, dim, Tiles::sum_scale(a) * key_sum[i].x,
               Tiles::sum_scale(a) * key_sum[i].y);
        const float factor = kGeneral ? a.value_scale : 1;
        add_at(a.grad_value, column, dim, factor * value_sum[i].x, factor * value_sum[i].y);
      }
    }
    __threadfence();  // another thread adds to the gradients in add()
    hopper::named_sync(kTileSync, 256);
  }

  __device__ __forceinline__ void add_at(const Gradient& to, std::int32_t column, int dim, float x,
                                         float y) const {
    if (to.data == nullptr || dim >= to.dim) return;
    add_pair<Adding::by_load>(to,
                              work.batch * to.strides.batch + column * to.strides.sequence +
                                  work.kv_head * to.strides.head + dim,
                              x, y);
  }

  __device__ __forceinline__ void store_grad_scores(Element* to,
                                                    const std::uint32_t (&packed)[kScores / 2]) {
    // Lane l gives the address of row l % 8 of matrix l / 8: keys 0 and 8, queries 0 and 8.
    const int key = group * 64 + warp % 4 * 16 + lane % 16;
#pragma unroll
    for (int query = 0; query < Tiles::kQueries; query += 16) {
      const int chunk = (query % 64 / 8 + lane / 16) ^ (key % 8);
      const std::uint32_t address =
          hopper::shared_address(to) + query / 64 * (Tiles::kKeys * 128) + key * 128 + chunk * 16;
      const int i = query / 4;
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
          "r"(packed[i]), "r"(packed[i + 1]), "r"(packed[i + 2]), "r"(packed[i + 3])
          : "memory");
    }
  }

  // Where dQ lies, swizzled as TMA expects it.
  [[nodiscard]] __device__ __forceinline__ float* sum_place(int box, int query, int dim) const {
    return shared.grad_query[sum_buffer()][box] + query * 32 + (dim / 4 ^ query % 8) * 4 + dim % 4;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sum_buffer() const {
    return kSplitsKeys ? group : at.count % Tiles::kSumBuffers;
  }
  __device__ __forceinline__ void wait_for_buffer() const {
    const std::uint32_t round = kSplitsKeys ? at.count : at.count / Tiles::kSumBuffers;
    shared.sum_empty[sum_buffer()].wait(round % 2 ^ 1);
    if (threadIdx.x == (kSplitsKeys ? 128 + 128 * group : 128)) {
      shared.sum_step[sum_buffer()] = shared.step[at.slot()];
    }
  }
  __device__ __forceinline__ void pass_buffer() const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    release(shared.sum_full[sum_buffer()]);
  }

  // Hands over this warp's part of the 64 × 32 sums of its pair of warps.
  __device__ __forceinline__ void add_query(const float (&sum)[32]) {
    if (a.grad_query.data == nullptr) return;
    wait_for_buffer();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int dim = warp % 2 * 16 + lane / 4 + 8 * h;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* const to = sum_place(kSplitsKeys ? warp % 4 / 2 : warp / 2, lane % 4 * 2 + j, dim);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i * 256] = Tiles::sum_scale(a) * sum[4 * i + 2 * h + j];
      }
    }
    pass_buffer();
  }

  // Hides the place in the ring from the compiler, so that values derived from it fill no
  // registers.
  __device__ __forceinline__ void forget_place() {
    if constexpr (Tiles::kDim == 64 || kGeneral) {
      asm volatile("" : "+r"(at.count));
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    }
  }

  __device__ __forceinline__ void release(hopper::Barrier& barrier) const {
    if (lane == 0) barrier.arrive();
  }

  // Factor of dO·Vᵀ where nothing drops.
  [[nodiscard]] __device__ __forceinline__ float grad_factor() const {
    return kGeneral ? a.kept_grad_scale : Tiles::score_scale(a);
  }

  // The weight of a logit. The logit is value · unit in the general class, and value · unit / log2
  // e in other classes. The LSE of the general class is natural, so that large biases do not
  // overflow before they cancel.
  [[nodiscard]] __device__ __forceinline__ static float weight_of(float value, float unit,
                                                                  float lse) {
    const float exponent = fmaf(value, unit, -lse);
    return exp2_fast(kGeneral ? exponent * kLog2E : exponent);
  }
  [[nodiscard]] __device__ __forceinline__ float unit() const {
    if constexpr (kGeneral) return a.scores.bias.data != nullptr ? 1 : a.scale;
    return a.scale * kLog2E;
  }
  [[nodiscard]] __device__ __forceinline__ float capped_unit() const {
    return kGeneral ? a.soft_cap : a.soft_cap * kLog2E;
  }
  // True if some of the tile's pairs may be hidden, or some of the thread's if that is known.
  [[nodiscard]] __device__ __forceinline__ bool has_hidden(std::uint32_t early) const {
    return kFindsEarly ? early != 0 : shared.step[at.slot()].masked != 0;
  }

  // Replaces scores by their weights.
  __device__ __forceinline__ void weigh(float (&scores)[kScores],
                                        std::uint32_t (&weights)[kScores / 2], std::int32_t row,
                                        std::uint32_t hidden) const {
    const float scale = unit();
    const std::uint32_t slot = at.slot();
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 lse =
          *reinterpret_cast<const float2*>(&shared.lse[slot][8 * i + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[4 * i + 2 * h] = weight_of(scores[4 * i + 2 * h], scale, lse.x);
        scores[4 * i + 2 * h + 1] = weight_of(scores[4 * i + 2 * h + 1], scale, lse.y);
      }
    }
    if (has_hidden(hidden)) {
      for_hidden(row, hidden, [&](int i) { scores[i] = 0; });
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) weights[i / 2] = pack<Element>(scores[i], scores[i + 1]);
  }

  // Like weigh(), or weigh_capped() if there is a soft cap. Dropout acts on `weights`, but not on
  // `scores`.
  __device__ __forceinline__ void weigh_general(float (&scores)[kScores],
                                                std::uint32_t (&weights)[kScores / 2],
                                                std::int32_t row, std::uint32_t hidden,
                                                std::uint32_t dropped) const {
    if (a.soft_cap != 0) {
      weigh_capped(scores, weights, row, hidden);
    } else {
      weigh(scores, weights, row, hidden);
    }
    if (a.dropout.threshold == 0) return;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const std::uint32_t bits = dropped >> i;
      if ((bits & 1) != 0) weights[i / 2] &= 0xffff0000;
      if ((bits & 2) != 0) weights[i / 2] &= 0x0000ffff;
    }
  }

  // The same, but leaves weights times the cap's derivative in `scores`.
  __device__ __forceinline__ void weigh_capped(float (&scores)[kScores],
                                               std::uint32_t (&weights)[kScores / 2],
                                               std::int32_t row, std::uint32_t hidden) const {
    const float scale = capped_unit();
    const std::uint32_t slot = at.slot();
    replace_by_tanh(scores, a);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 lse =
          *reinterpret_cast<const float2*>(&shared.lse[slot][8 * i + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 4 * i + 2 * h;
        const float x = weight_of(scores[j], scale, lse.x);
        const float y = weight_of(scores[j + 1], scale, lse.y);
        weights[j / 2] = pack<Element>(x, y);
        scores[j] = x * fmaf(-scores[j], scores[j], 1);
        scores[j + 1] = y * fmaf(-scores[j + 1], scores[j + 1], 1);
      }
    }
    if (!has_hidden(hidden)) return;
    for_hidden(row, hidden, [&](int i) {
      scores[i] = 0;
      weights[i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
    });
  }

  __device__ __forceinline__ void step(float (&key_sum)[kSums], float (&value_sum)[kSums]) {
    const std::uint32_t slot = at.slot(), parity = at.parity();
    // Hides from the compiler that they are the same in every step: derived values would fill
    // registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[slot].wait(parity);
    const std::int32_t row = shared.step[slot].tile * Tiles::kQueries;
    const std::int32_t flags = __float_as_int(shared.lse[slot][Tiles::kQueries]);
    const bool masked = shared.step[slot].masked != 0;
    Rows rows;
    if constexpr (kLists) {
      if (masked) read_rows(rows, row);
    }
    if (masked || (flags & kHiddenRows) != 0 || has_scores()) {
      if (is_special(flags)) {
        if constexpr (kGeneral) skip_scores();
        differentiate_pairs(row);
        release(shared.output_empty[slot]);
        release(shared.query_empty[slot]);
        at.next();
        return;
      }
    }
    const float factor = grad_factor();
    std::uint32_t hidden = 0, dropped = 0;
    float scores[kScores], grads[kScores];
    std::uint32_t weights[kScores / 2], packed[kScores / 2];
    hopper::leave_undefined(scores);
    hopper::leave_undefined(grads);
    hopper::products_begin();
    issue_scores(scores, shared.key, shared.query[slot]);
    if constexpr (kLists) {
      if (masked) find_hidden(rows);
    }
    if constexpr (kGeneral) {
      if (a.scores.mask.data != nullptr) find_masked(row);
      if (a.dropout.threshold != 0) dropped = draw_dropped(row);
    }
    if constexpr (kFindsEarly) hidden = hidden_bits(0);
    shared.output_full[slot].wait(parity);
    hopper::products_begin();
    issue_scores(grads, shared.value, shared.grad_output[slot]);
    forget_place();
    hopper::products_wait<1>();
    hopper::pin(scores);
    if constexpr (kGeneral) {
      if (a.scores.bias.data != nullptr) add_bias(scores);
      weigh_general(scores, weights, row, hidden, dropped);
    } else if constexpr (kSoftCap) {
      weigh_capped(scores, weights, row, hidden);
    } else {
      weigh(scores, weights, row, hidden);
    }
    hopper::products_wait<0>();
    hopper::pin(grads);
    hopper::pin(weights);
    hopper::pin(value_sum);
    hopper::products_begin();
    issue_sum(value_sum, weights, shared.grad_output[slot]);
    forget_place();
    if constexpr (kGeneral) {
      if (a.dropout.threshold != 0) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          // Times 0 rather than set to 0, so that products that are not finite count.
          if ((dropped >> i & 1) != 0) grads[i] *= 0;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[at.slot()][8 * i + 2 * (lane % 4)]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = 4 * i + 2 * h;
        scores[j] *= fmaf(grads[j], factor, -delta.x);
        scores[j + 1] *= fmaf(grads[j + 1], factor, -delta.y);
        packed[j / 2] = pack<Element>(scores[j], scores[j + 1]);
      }
    }
    Element* const grad_score = shared.grad_score[at.count % 2];
    store_grad_scores(grad_score, packed);
    if constexpr (kGeneral) {
      if (a.grad_bias != nullptr) {
        store_bias_gradient([&](int i) { return a.grad_bias_scale * scores[i]; });
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if constexpr (kSplitsKeys) {
      hopper::named_sync(kGroupSync + group, 128);
    } else {
      hopper::named_sync(kTileSync, 256);
    }
    float query_sum[32];
    hopper::leave_undefined(query_sum);
    hopper::pin(packed);
    hopper::pin(key_sum);
    hopper::products_begin();
    issue_query(query_sum, grad_score);
    issue_sum(key_sum, packed, shared.query[at.slot()]);
    hopper::products_wait<1>();
    hopper::pin(value_sum);
    hopper::pin(weights);
    hopper::pin(query_sum);
    release(shared.output_empty[at.slot()]);
    add_query(query_sum);
    hopper::products_wait<0>();
    hopper::pin(key_sum);
    hopper::pin(packed);
    release(shared.query_empty[at.slot()]);
    at.next();
  }

  __device__ __forceinline__ void add(const Gradient& to, const float (&sum)[kSums],
                                      float factor) const {
    if (to.data == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t column = work.first_column + group * 64 + warp % 4 * 16 + lane / 4 + 8 * h;
      if (column < work.columns) {
        add_sums<kLists ? Adding::in_l2 : Adding::by_load>(to, work.batch, column, work.kv_head,
                                                           sum, h, factor);
      }
    }
  }

  const Arguments& a;
  const Work<Tiles>& work;
  SharedTiles<Tiles>& shared;
  RingPosition<Tiles::kStages> at;
  int warp, group, lane;
};

/// True if the thread's key has no position, or the one that it would have if all keys of the tile
/// were neighbours.
template <class Tiles>
[[nodiscard]] __device__ __forceinline__ bool is_neighbour(const Arguments& a,
                                                           const Work<Tiles>& work,
                                                           std::uint32_t thread) {
  const std::int32_t* const positions = a.mask.column_positions + work.first_column;
  if (thread >= Tiles::kKeys || positions[thread] == TileMask::kNowhere) return true;
  return positions[thread] == positions[0] + static_cast<int>(thread);
}

/// Gradients of a key tile and a key/value head, in the manner of FlashAttention-3's backward pass
/// (Shah et al. 2024). Sᵀ rather than S is computed, so that weights stay in registers.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate(const __grid_constant__ Arguments a) {
  constexpr bool kLists = Tiles::kPairs != PairClass::band;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<SharedTiles<Tiles>*>(bytes);
  if (threadIdx.x == 0) {
    Work<Tiles>& work = shared.work;
    work.find(a, work_index(a));
    shared.steps = kLists ? 0 : (work.last_tile - work.first_tile + 1) * a.heads_per_kv_head;
    shared.special_keys = 0;
    shared.key_full.init(1);
    shared.key_watched.init(96);
    for (int i = 0; i < Tiles::kStages; ++i) {
      shared.query_full[i].init(1);
      shared.output_full[i].init(1);
      shared.query_empty[i].init(8);
      shared.output_empty[i].init(8);
    }
    for (int i = 0; i < Tiles::kSumBuffers; ++i) {
      shared.sum_full[i].init(Tiles::kSumWarps);
      shared.sum_empty[i].init(1);
    }
    if constexpr (Tiles::kGeneral) {
      for (hopper::Barrier& barrier : shared.scores.bias_full) barrier.init(64);
      for (hopper::Barrier& barrier : shared.scores.bias_read) barrier.init(8);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (Tiles::kGeneral) {
    const bool all = __syncthreads_and(is_neighbour(a, shared.work, threadIdx.x)) != 0;
    if (threadIdx.x == 0) {
      const auto can_copy = [&](const auto* data, const std::int64_t(&strides)[4]) {
        return can_copy_rows(a, shared.work, all, data, strides);
      };
      const auto& mask = a.scores.mask;
      shared.copies_mask =
          mask.data != nullptr && a.scores.bias.data == nullptr && can_copy(mask.data, mask.strides)
              ? 1
              : 0;
      shared.neighbours = all ? 1 : 0;
      shared.copies_rows = can_copy(a.scores.bias.data, a.scores.bias.strides) &&
                                   can_copy(a.grad_bias, a.grad_bias_strides)
                               ? 1
                               : 0;
    }
  }
  if constexpr (kLists) {
    atomicAdd(&shared.steps, steps_of_thread(a, shared.work));
    __syncthreads();
  }
  if (shared.steps <= 0) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<Tiles::kFewRegisters>();
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      produce<Tiles>(a, shared);
    } else if (thread >= 32) {
      watch_keys<Tiles>(shared, thread - 32);
      // One thread adds dQ where two warps prepare scores.
      if (Tiles::kGeneral && thread >= 64) {
        if constexpr (Tiles::kGeneral) ScorePreparation<Tiles>(a, shared).run();
      } else if (a.grad_query.data != nullptr && thread % 32 == 0) {
        constexpr int kThreads = Tiles::kGeneral ? 1 : 2;
        if (thread / 32 <= kThreads) add_queries<Tiles, kThreads>(a, shared, thread / 32 - 1);
      }
    }
  } else {
    hopper::take_registers<Tiles::kManyRegisters>();
    Consumer<Tiles>(a, shared).run();
  }
}

template <class Tiles>
cudaError_t launch(const Arguments& a, unsigned items, cudaStream_t stream) {
  constexpr std::size_t kShared = sizeof(SharedTiles<Tiles>);
  static_assert(kShared <= 227 * 1024);
  const auto kernel = &differentiate<Tiles>;
  if (const cudaError_t code =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    return code;
  }
  kernel<<<items, Tiles::kThreads, kShared, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace annulus::flash::backward
