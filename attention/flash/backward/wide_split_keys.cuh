#pragma once

#include <cstdint>

#include "flash/backward/dropout.cuh"
#include "flash/backward/wide_key_tiles.cuh"

namespace annulus::flash::backward {

/// Two warpgroups share a key tile.
template <class Tiles>
class SplitKeyConsumer : WideKeyConsumer<Tiles> {
  using Base = WideKeyConsumer<Tiles>;
  using Base::a, Base::at, Base::kPacked, Base::kScores, Base::lane, Base::release, Base::shared,
      Base::warp, Base::work;
  using typename Base::Element, typename Base::Rows;

 public:
  __device__ __forceinline__ SplitKeyConsumer(const Arguments& arguments,
                                              WideKeyMemory<Tiles>& memory)
      : Base(arguments, memory) {
    if constexpr (Tiles::kGeneral) {
      if (a.scores.bias.data == nullptr) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        bias_keys_[h] = key_at(a, work.first_column + Base::first_row() + 8 * h);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (warp < 4) {
      run_weights();
    } else {
      run_scores();
    }
  }

 private:
  __device__ __forceinline__ void run_weights() {
    float sum[Tiles::kValueDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    float bias[kScores];
    hopper::leave_undefined(bias);
    if constexpr (Tiles::kGeneral) {
      // The bias of the next step arrives while this step ends.
      bool more = Base::begin_step();
      if (more) read_bias(bias);
      while (more) {
        add_weights(sum, bias, [&] {
          at.next();
          more = Base::begin_step();
          if (more) read_bias(bias);
        });
      }
    } else {
      for (; Base::begin_step(); at.next()) add_weights(sum, bias, [] {});
    }
    Base::add(a.grad_value, sum, value_scale<Tiles>(a));
  }

  __device__ __forceinline__ void run_scores() {
    float sum[Tiles::kDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    for (; Base::begin_step(); at.next()) add_scores(sum);
    Base::add(a.grad_key, sum, Tiles::sum_scale(a));
  }

  // Where matrix l / 8 of this lane l has its row l % 8: keys 0 and 8, queries 0 and 8 from
  // `query` on.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t weight_address(int query) const {
    const int key = warp % 4 * 16 + lane % 16;
    const int chunk = (query / 8 + lane / 16) ^ (key % 8);
    return hopper::shared_address(shared.weights.of[at.slot()]) + key * 128 + chunk * 16;
  }
  __device__ __forceinline__ void store_weights(const std::uint32_t (&packed)[kPacked]) const {
#pragma unroll
    for (int i = 0; i < kPacked; i += 4) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       weight_address(4 * i)),
                   "r"(packed[i]), "r"(packed[i + 1]), "r"(packed[i + 2]), "r"(packed[i + 3])
                   : "memory");
    }
  }
  __device__ __forceinline__ void load_weights(std::uint32_t (&packed)[kPacked]) const {
#pragma unroll
    for (int i = 0; i < kPacked; i += 4) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(packed[i]), "=r"(packed[i + 1]), "=r"(packed[i + 2]), "=r"(packed[i + 3])
                   : "r"(weight_address(4 * i))
                   : "memory");
    }
  }

  // `bias` is that of the step. Calls meanwhile() while the last product runs, or after it if it is
  // computed pair by pair.
  template <int kSums, class Meanwhile>
  __device__ __forceinline__ void add_weights(float (&sum)[kSums], const float (&bias)[kScores],
                                              const Meanwhile& meanwhile) {
    const std::uint32_t slot = at.slot();
    const bool masked = Base::is_masked();
    Rows rows;
    if (masked && a.mask.key_tiles > 0) Base::read_rows(rows);
    float scores[kScores];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kDim>(scores, shared.key[0], shared.query[slot]);
    std::uint32_t hidden = 0;
    if (Base::is_masked_without_bias()) {
      Base::find_hidden(rows);
      hidden = Base::hidden_bits();
    }
    hopper::products_wait<0>();
    hopper::pin(scores);
    if (Tiles::kGeneral && a.scores.bias.data != nullptr) Base::add_bias(scores, bias, hidden);
    std::uint32_t weights[kPacked], derived[kPacked];
    Base::weigh(scores, weights, [&](int n) {
      return *reinterpret_cast<const float2*>(&shared.lse[slot][8 * n + 2 * (lane % 4)]);
    });
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      derived[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
    if (masked && __any_sync(0xffffffff, hidden != 0) != 0) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        const std::uint32_t mask = Base::halves(hidden, i);
        weights[i] &= ~mask;
        derived[i] = (derived[i] & ~mask) | (mask & kNegativeZeros);
      }
    }
    store_weights(derived);
    release(shared.weights.full[slot]);
    shared.output_full[slot].wait(at.parity());
    if constexpr (Tiles::kGeneral) {
      if (a.dropout.threshold != 0) {
        shared.dropped.full[slot].wait(at.parity());
        drop<Element>(weights, {dropped_bits()});
      }
    }
    const bool special = masked && (shared.verdict[slot].wait(at.parity()) & kSpecialOutputs) != 0;
    // Only now: the verdict on the slot's next queries takes the place of this one.
    release(shared.query_empty[slot]);
    Base::add_to(
        sum, weights, shared.grad_output[slot], special, [&] { return hidden; }, meanwhile);
    release(shared.output_empty[slot]);
  }

  // Calls use(entry, score) for each score of the thread, with the score's entry in a tensor
  // indexed like the bias. Scores past the last row or column get an entry of another pair.
  template <class T, class Use>
  __device__ __forceinline__ void for_entries(T* data, const std::int64_t (&strides)[4],
                                              const Use& use) const {
    const auto& step = shared.step[at.slot()];
    const std::int32_t first = step.tile * Tiles::kQueries + lane % 4 * 2;
    T* const of_row = data + work.batch * strides[0] + step.head * strides[1] +
                      min(first, a.rows - 1) * strides[2];
    T* entries[2] = {of_row + bias_keys_[0] * strides[3], of_row + bias_keys_[1] * strides[3]};
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) use(entries[h], i / 2 * 4 + 2 * h + i % 2);
      // Entries i are in row first + i / 2 · 8 + i % 2.
      const int rows = i % 2 == 0 ? 1 : 7;
      if (first + i / 2 * 8 + i % 2 + rows >= a.rows) continue;
#pragma unroll
      for (T*& entry : entries) entry += rows * strides[2];
    }
  }
  // Does nothing without a bias.
  __device__ __forceinline__ void read_bias(float (&bias)[kScores]) const {
    if (a.scores.bias.data == nullptr) return;
    for_entries(a.scores.bias.data, a.scores.bias.strides,
                [&](const float* entry, int i) { bias[i] = __ldg(entry); });
  }
  // Adds dS of visible pairs to the bias's gradient.
  __device__ __forceinline__ void add_bias_gradient(const float (&grads)[kScores],
                                                    std::uint32_t hidden) const {
    const float factor = Tiles::bias_scale(a);
    for_entries(a.grad_bias, a.grad_bias_strides, [&](float* entry, int i) {
      if ((hidden >> i & 1) == 0) atomicAdd(entry, factor * grads[i]);
    });
  }

  // Draws for both warpgroups. Two warps share the draws: each of their threads draws a row.
  __device__ __forceinline__ void draw() const {
    const auto& step = shared.step[at.slot()];
    const int even = warp % 4 / 2 * 2, r = warp % 2 * 32 + lane;
    const std::uint32_t bits = draw_row<2>(
        a, {work.batch, step.head, step.tile * Tiles::kQueries + r, work.first_column + even * 16},
        Base::neighbours);
    auto& dropped = shared.dropped.of[at.slot()];
    dropped[even][r] = static_cast<std::uint16_t>(bits);
    dropped[even + 1][r] = static_cast<std::uint16_t>(bits >> 16U);
    hopper::named_sync(1 + even / 2, 64);
    release(shared.dropped.full[at.slot()]);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t dropped_bits() const {
    return gather_bits(
        reinterpret_cast<const unsigned char*>(shared.dropped.of[at.slot()][warp % 4]), lane);
  }

  // True if the warp has a hidden pair, whose weight is −0. Other weights have no sign.
  [[nodiscard]] __device__ __forceinline__ static bool has_hidden(
      const std::uint32_t (&weights)[kPacked]) {
    std::uint32_t signs = 0;
#pragma unroll
    for (const std::uint32_t pair : weights) signs |= pair;
    return __any_sync(0xffffffff, (signs & kNegativeZeros) != 0) != 0;
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(float (&sum)[kSums]) {
    const std::uint32_t slot = at.slot();
    float grads[kScores];
    hopper::leave_undefined(grads);
    shared.output_full[slot].wait(at.parity());
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.value[0], shared.grad_output[slot]);
    const bool drops = Tiles::kGeneral && a.dropout.threshold != 0;
    if constexpr (Tiles::kGeneral) {
      if (drops) draw();
    }
    hopper::products_wait<0>();
    hopper::pin(grads);
    if constexpr (Tiles::kGeneral) {
      if (drops) drop(grads, {dropped_bits()});
    }
    shared.weights.full[slot].wait(at.parity());
    std::uint32_t packed[kPacked];
    load_weights(packed);
    const bool masked = Base::is_masked();
    std::uint32_t hidden = 0;
    if (masked && has_hidden(packed)) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        hidden |= (packed[i] >> 15 & 1) << 2 * i | packed[i] >> 31 << (2 * i + 1);
      }
    }
    const float scale = Base::grad_factor();
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[slot][i / 2 * 8 + 2 * (lane % 4)]);
      const float2 weight = Base::unpack(packed[i]);
      grads[2 * i] = weight.x * fmaf(grads[2 * i], scale, -delta.x);
      grads[2 * i + 1] = weight.y * fmaf(grads[2 * i + 1], scale, -delta.y);
      packed[i] = pack<Element>(grads[2 * i], grads[2 * i + 1]);
    }
    release(shared.output_empty[slot]);
    if constexpr (Tiles::kGeneral) {
      if (a.grad_bias != nullptr) add_bias_gradient(grads, hidden);
    }
    bool special = false;
    if (masked) {
      Base::hide_scores(packed, hidden);
      special = (shared.verdict[slot].wait(at.parity()) & kSpecialQueries) != 0;
    }
    Base::leave_scores(packed);
    Base::add_to(sum, packed, shared.query[slot], special, [&] { return hidden; });
    release(shared.query_empty[slot]);
  }

  std::int64_t bias_keys_[2] =
      {};  // of the thread's keys in the bias and its gradient; unset without a bias
};

}  // namespace annulus::flash::backward
