#pragma once

#include <cstdint>

#include "flash/backward/wide_key_tiles.cuh"

namespace annulus::flash::backward {

/// Two warpgroups share a key tile.
template <class Tiles>
class SplitKeyConsumer : WideKeyConsumer<Tiles> {
  using Base = WideKeyConsumer<Tiles>;
  using Base::a, Base::at, Base::kPacked, Base::kScores, Base::lane, Base::release, Base::shared,
      Base::warp;
  using typename Base::Element, typename Base::Rows;

 public:
  __device__ __forceinline__ SplitKeyConsumer(const Arguments& arguments,
                                              WideKeyMemory<Tiles>& memory)
      : Base(arguments, memory) {}

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
    for (; Base::begin_step(); at.next()) add_weights(sum);
    Base::add(a.grad_value, sum, Tiles::value_scale(a));
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

  template <int kSums>
  __device__ __forceinline__ void add_weights(float (&sum)[kSums]) {
    const std::uint32_t slot = at.slot();
    const bool masked = Base::is_masked();
    Rows rows;
    if (masked && a.mask.key_tiles > 0) Base::read_rows(rows);
    float scores[kScores];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kDim>(scores, shared.key[0], shared.query[slot]);
    std::uint32_t hidden = 0;
    if (masked) {
      Base::find_hidden(rows);
      hidden = Base::hidden_bits();
    }
    hopper::products_wait<0>();
    hopper::pin(scores);
    std::uint32_t weights[kPacked], derived[kPacked];
    Base::weigh(scores, weights, [&](int n, int) {
      return *reinterpret_cast<const float2*>(&shared.lse[slot][8 * n + 2 * (lane % 4)]);
    });
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      derived[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        const std::uint32_t mask = Base::halves(hidden, i);
        weights[i] &= ~mask;
        derived[i] = (derived[i] & ~mask) | (mask & 0x80008000U);
      }
    }
    store_weights(derived);
    release(shared.weights.full[slot]);
    release(shared.query_empty[slot]);
    shared.output_full[slot].wait(at.parity());
    const bool special = masked && (shared.verdict[slot].wait(at.parity()) & kSpecialOutputs) != 0;
    Base::add_to(sum, weights, shared.grad_output[slot], special, [&] { return hidden; });
    release(shared.output_empty[slot]);
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(float (&sum)[kSums]) {
    const std::uint32_t slot = at.slot();
    float grads[kScores];
    hopper::leave_undefined(grads);
    shared.output_full[slot].wait(at.parity());
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.value[0], shared.grad_output[slot]);
    hopper::products_wait<0>();
    hopper::pin(grads);
    shared.weights.full[slot].wait(at.parity());
    std::uint32_t packed[kPacked];
    load_weights(packed);
    const bool masked = Base::is_masked();
    std::uint32_t hidden = 0;
    if (masked) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        hidden |= (packed[i] >> 15 & 1) << 2 * i | packed[i] >> 31 << (2 * i + 1);
      }
    }
    const float scale = Tiles::score_scale(a);
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[slot][i / 2 * 8 + 2 * (lane % 4)]);
      const float2 weight = Base::unpack(packed[i]);
      packed[i] = pack<Element>(weight.x * fmaf(grads[2 * i], scale, -delta.x),
                                weight.y * fmaf(grads[2 * i + 1], scale, -delta.y));
    }
    release(shared.output_empty[slot]);
    bool special = false;
    if (masked) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) packed[i] &= ~Base::halves(hidden, i);
      special = (shared.verdict[slot].wait(at.parity()) & kSpecialQueries) != 0;
    }
    Base::add_to(sum, packed, shared.query[slot], special, [&] { return hidden; });
    release(shared.query_empty[slot]);
  }
};

}  // namespace annulus::flash::backward
