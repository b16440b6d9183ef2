#pragma once

#include "flash/backward/arguments.hpp"
#include "flash/backward/dropout.cuh"
#include "flash/backward/pair_bits.cuh"
#include "flash/backward/scores.cuh"
#include "flash/backward/soft_cap.cuh"
#include "flash/backward/special.cuh"
#include "flash/backward/tiles.cuh"
#include "flash/backward/walk.cuh"
#include "flash/shared.cuh"
#include "flash/softmax.cuh"

namespace annulus::flash::backward {

/// The pairs of a consumer warp's 16 keys and a step's queries: which are hidden or dropped, their
/// bias and its gradient, their weights.
template <class Tiles>
class ConsumerWeights {
 protected:
  using Element = typename Tiles::Element;
  static constexpr bool kLists = Tiles::kPairs != PairClass::band;
  static constexpr bool kDrops = Tiles::kDrops;
  static constexpr bool kGeneral = Tiles::kGeneral;
  static constexpr bool kSoftCap = Tiles::kSoftCap;
  static constexpr int kScores = Tiles::kQueries / 2;
  // Named barriers of both warpgroups, and then of each.
  static constexpr int kTileSync = 1;
  static constexpr int kSpecialSync = 2;
  static constexpr int kGroupSync = 3;
  static constexpr int kPairSync = 5;  // and three more, for each pair of warps
  // Calls of Philox that run at a time.
  static constexpr int kDraws = Tiles::kDim == 64 ? 4 : 2;

  __device__ __forceinline__ ConsumerWeights(const Arguments& arguments, SharedTiles<Tiles>& memory)
      : a(arguments), work(memory.work), shared(memory) {
    warp = __shfl_sync(0xffffffff, threadIdx.x / 32 - 4, 0);
    group = warp / 4;
    lane = threadIdx.x % 32;
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

  // The warp's keys, and its shared memory before store_grad_scores(), which stores dS of these
  // keys there.
  [[nodiscard]] __device__ __forceinline__ WarpScores warp_scores() const {
    return {work.batch, shared.step[at.slot()].head,
            work.first_column + static_cast<std::int32_t>(warp) * 16, static_cast<int>(lane),
            reinterpret_cast<unsigned char*>(shared.grad_score[at.count % 2]) + warp * 16 * 128};
  }
  // The dropout class always has dropout, but asks too: without the branch, registers are spilled.
  [[nodiscard]] __device__ __forceinline__ bool has_dropout() const {
    return kDrops && a.dropout.threshold != 0;
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

  // The consumer finds these bits before it has the step's scores: those of dropped pairs and, if
  // kFindsEarly, those of hidden pairs (see hidden_bits()).
  struct Found {
    std::uint32_t hidden = 0;
    DroppedBits<kScores> dropped;
    bool masked = false;  // whether the step's tile is masked
  };

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
    if (a.scores.bias.data == nullptr && shared.scores.in_boxes != 0) {
      wait_for_bias();
      const float* const box = shared.scores.bias[at.count % Tiles::kBiasStages][0];
#pragma unroll
      for (int r = lane; r < Tiles::kQueries; r += 32) {
        const std::uint32_t shown =
            set_of_16(*reinterpret_cast<const uint4*>(box + place_in_box(r, 4 * warp)));
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

  // Draws the step's dropout. Two warps share the draws: each thread draws one row of every 64.
  __device__ __forceinline__ void draw(DroppedBits<kScores>& dropped, std::int32_t row) const {
    const WarpScores of = warp_scores();
    const int odd = warp % 2;
    unsigned char* const even_keys = of.own - odd * 16 * 128;
#pragma unroll 1
    for (int r = 32 * odd + lane; r < Tiles::kQueries; r += 64) {
      const std::uint32_t bits = draw_row<kDraws>(
          a, {of.batch, of.head, row + r, of.column - 16 * odd}, shared.neighbours != 0);
      reinterpret_cast<std::uint16_t*>(even_keys + kDropped)[r] = static_cast<std::uint16_t>(bits);
      reinterpret_cast<std::uint16_t*>(even_keys + 16 * 128 + kDropped)[r] =
          static_cast<std::uint16_t>(bits >> 16U);
    }
    hopper::named_sync(kPairSync + warp / 2, 64);
#pragma unroll
    for (int part = 0; part < kScores / 32; ++part) dropped[part] = bits_at(kDropped, part);
  }

  // Calls use(entry, i) for the entry of score i in the step's bias.
  template <class Use>
  __device__ __forceinline__ void for_bias(const Use& use) const {
    for_box<kScores>(shared.scores.bias[at.count % Tiles::kBiasStages][warp / 2], 2 * (lane % 4),
                     warp % 2 * 16 + lane / 4, use);
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
    for_bias([&](float bias, int i) { scores[i] = fmaf(scores[i], a.scale, bias); });
    if (a.grad_bias == nullptr) pass_bias();
  }

  // Overwrites the bias with its gradient.
  template <class Of>
  __device__ __forceinline__ void store_bias_gradient(Of of) const {
    for_bias([&](float& entry, int i) { entry = of(i); });
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    pass_bias();
  }

  // Consumes the bias or mask that ScorePreparation has copied for a step that is computed pair by
  // pair.
  __device__ __forceinline__ void skip_scores() const {
    if (a.scores.bias.data == nullptr && shared.scores.in_boxes == 0) return;
    wait_for_bias();
    if (a.grad_bias == nullptr) {
      pass_bias();
    } else {
      store_bias_gradient([](int) { return 0.0F; });
    }
  }

  // LSE or delta of the thread's queries. A read after products in program order waits until the
  // last of them has begun, so these reads precede the next products if registers suffice.
  static constexpr bool kReadsEarly = kScores == 32 && !kGeneral;
  using RowValues = float2[kReadsEarly ? kScores / 4 : 1];
  __device__ __forceinline__ void read_early(RowValues& values, const float* of_slot) const {
    if constexpr (kReadsEarly) {
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) values[i] = read_values(of_slot, i);
    }
  }
  // The values for scores 4i to 4i + 3.
  [[nodiscard]] __device__ __forceinline__ float2 values_of(const RowValues& early,
                                                            const float* of_slot, int i) const {
    return kReadsEarly ? early[kReadsEarly ? i : 0] : read_values(of_slot, i);
  }
  [[nodiscard]] __device__ __forceinline__ float2 read_values(const float* of_slot, int i) const {
    return *reinterpret_cast<const float2*>(of_slot + 8 * i + 2 * (lane % 4));
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
    const std::int32_t row = first_row + r, column = work.first_column + k;
    if constexpr (kDrops) {
      if (has_dropout()) kept = drops(row, column) ? 0 : 1;
    }
    if constexpr (kGeneral) {
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

  // dO·Vᵀ is multiplied by this where a pair is not dropped.
  [[nodiscard]] __device__ __forceinline__ float grad_factor() const {
    return kDrops ? a.value_scale : 1;
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
  [[nodiscard]] __device__ __forceinline__ bool has_hidden(const Found& found) const {
    if constexpr (kFindsEarly) return found.hidden != 0;
    return kReadsEarly ? found.masked : shared.step[at.slot()].masked != 0;
  }

  // Replaces scores by their weights.
  __device__ __forceinline__ void weigh_plain(float (&scores)[kScores],
                                              std::uint32_t (&weights)[kScores / 2],
                                              std::int32_t row, const Found& found,
                                              const RowValues& early) const {
    const float scale = unit();
    const float* const of_slot = shared.lse[at.slot()];
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 lse = values_of(early, of_slot, i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[4 * i + 2 * h] = weight_of(scores[4 * i + 2 * h], scale, lse.x);
        scores[4 * i + 2 * h + 1] = weight_of(scores[4 * i + 2 * h + 1], scale, lse.y);
      }
    }
    if (has_hidden(found)) {
      for_hidden(row, found.hidden, [&](int i) { scores[i] = 0; });
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) weights[i / 2] = pack<Element>(scores[i], scores[i + 1]);
  }

  // Like weigh_plain(), but leaves weights times the cap's derivative in `scores`.
  __device__ __forceinline__ void weigh_capped(float (&scores)[kScores],
                                               std::uint32_t (&weights)[kScores / 2],
                                               std::int32_t row, const Found& found,
                                               const RowValues& early) const {
    const float scale = capped_unit();
    const float* const of_slot = shared.lse[at.slot()];
    replace_by_tanh(scores, a);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float2 lse = values_of(early, of_slot, i);
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
    if (!has_hidden(found)) return;
    for_hidden(row, found.hidden, [&](int i) {
      scores[i] = 0;
      weights[i / 2] &= i % 2 == 0 ? 0xffff0000 : 0x0000ffff;
    });
  }

  // Waits for the step's queries. False if the step must be computed pair by pair. `rows`: of a
  // masked tile.
  [[nodiscard]] __device__ __forceinline__ bool is_regular(Rows& rows) const {
    const std::uint32_t slot = at.slot();
    shared.query_full[slot].wait(at.parity());
    const std::int32_t row = shared.step[slot].tile * Tiles::kQueries;
    const std::int32_t flags = __float_as_int(shared.lse[slot][Tiles::kQueries]);
    const bool masked = shared.step[slot].masked != 0;
    if constexpr (kLists) {
      if (masked) read_rows(rows, row);
    }
    return (!masked && (flags & kHiddenRows) == 0 && !has_scores()) || !is_special(flags);
  }

  [[nodiscard]] __device__ __forceinline__ Found find_pairs(const Rows& rows,
                                                            std::int32_t row) const {
    Found found;
    found.masked = shared.step[at.slot()].masked != 0;
    if constexpr (kLists) {
      if (found.masked) find_hidden(rows);
    }
    if constexpr (kGeneral) {
      if (a.scores.mask.data != nullptr) find_masked(row);
    }
    if constexpr (kDrops) {
      if (has_dropout()) draw(found.dropped, row);
    }
    if constexpr (kFindsEarly) found.hidden = hidden_bits(0);
    return found;
  }

  // Replaces scores by weights, times the derivative of the soft cap if there is one. Dropout acts
  // on `weights` only.
  __device__ __forceinline__ void weigh(float (&scores)[kScores],
                                        std::uint32_t (&weights)[kScores / 2], std::int32_t row,
                                        const Found& found, const RowValues& early) const {
    if constexpr (kGeneral) {
      if (a.scores.bias.data != nullptr) add_bias(scores);
    }
    if (kSoftCap || (kGeneral && a.soft_cap != 0)) {
      weigh_capped(scores, weights, row, found, early);
    } else {
      weigh_plain(scores, weights, row, found, early);
    }
    if constexpr (kDrops) {
      if (has_dropout()) backward::drop<Element>(weights, found.dropped);
    }
  }

  // Drops dP of the pairs that dropout drops.
  __device__ __forceinline__ void drop(float (&grads)[kScores], const Found& found) const {
    if constexpr (kDrops) {
      if (has_dropout()) backward::drop(grads, found.dropped);
    }
  }

  const Arguments& a;
  const Work<Tiles>& work;
  SharedTiles<Tiles>& shared;
  RingPosition<Tiles::kStages> at;
  // Unsigned: dividing a signed number by a power of two takes several instructions.
  std::uint32_t warp, group, lane;
};

}  // namespace annulus::flash::backward
