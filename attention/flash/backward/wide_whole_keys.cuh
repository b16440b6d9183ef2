#pragma once

#include <cstdint>

#include "flash/backward/wide_key_tiles.cuh"

namespace annulus::flash::backward {

/// Each of two warpgroups has a key tile.
template <class Tiles>
class WholeKeyConsumer : WideKeyConsumer<Tiles> {
  using Base = WideKeyConsumer<Tiles>;
  using Base::a, Base::at, Base::kPacked, Base::kScores, Base::lane, Base::release, Base::shared;
  using typename Base::Element, typename Base::Rows;

 public:
  __device__ __forceinline__ WholeKeyConsumer(const Arguments& arguments,
                                              WideKeyMemory<Tiles>& memory)
      : Base(arguments, memory) {}

  __device__ __forceinline__ void run() {
    float key_sum[Tiles::kDim / 2], value_sum[Tiles::kValueDim / 2];
#pragma unroll
    for (float& x : key_sum) x = 0;
#pragma unroll
    for (float& x : value_sum) x = 0;
    for (; Base::begin_step(); at.next()) {
      if (shared.step[at.slot()].seen[Base::key_tile()] != Seen::nothing) {
        step(key_sum, value_sum);
      } else {
        shared.output_full[at.slot()].wait(at.parity());
        release(shared.output_empty[at.slot()]);
      }
      release(shared.query_empty[at.slot()]);
    }
    Base::add(a.grad_key, key_sum, Tiles::sum_scale(a));
    Base::add(a.grad_value, value_sum, value_scale<Tiles>(a));
  }

 private:
  __device__ __forceinline__ void hide(std::uint32_t (&weights)[kPacked]) const {
    const std::uint32_t hidden = Base::hidden_bits();
#pragma unroll
    for (int i = 0; i < kPacked; ++i) weights[i] &= ~Base::halves(hidden, i);
  }

  // Each product runs while the numbers that the next one needs are computed. Values that are
  // needed again are read again, as the sums leave few registers.
  template <int kKeySums, int kValueSums>
  __device__ __forceinline__ void step(float (&key_sum)[kKeySums], float (&value_sum)[kValueSums]) {
    const std::uint32_t slot = at.slot();
    Rows rows;
    if (Base::is_masked() && a.mask.key_tiles > 0) Base::read_rows(rows);
    float scores[kScores];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kDim>(scores, shared.key[Base::key_tile()],
                                             shared.query[slot]);
    if (Base::is_masked()) Base::find_hidden(rows);
    hopper::products_wait<0>();
    hopper::pin(scores);
    std::uint32_t weights[kPacked], packed[kPacked];
    Base::weigh(scores, weights, [&](int n) {
      return *reinterpret_cast<const float2*>(&shared.lse[slot][8 * n + 2 * (lane % 4)]);
    });
    shared.output_full[slot].wait(at.parity());
    const auto hidden = [&] { return Base::hidden_bits(); };
    std::int32_t special = 0;
    if (Base::is_masked()) {
      hide(weights);
      special = shared.verdict[slot].wait(at.parity());
    }
    // The soft cap's derivative belongs to dS alone.
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed[i] = a.soft_cap != 0 ? pack<Element>(scores[2 * i], scores[2 * i + 1]) : weights[i];
    }
    float grads[kScores];
    hopper::leave_undefined(grads);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.value[Base::key_tile()],
                                                  shared.grad_output[slot]);
    if (special != 0) {
      hopper::products_wait<0>();
      hopper::pin(grads);
      Base::add_to(value_sum, weights, shared.grad_output[slot], (special & kSpecialOutputs) != 0,
                   hidden);
      differentiate_scores(packed, grads);
      release(shared.output_empty[slot]);
      Base::add_to(key_sum, packed, shared.query[slot], (special & kSpecialQueries) != 0, hidden);
      return;
    }
    hopper::pin(weights);
    hopper::pin(value_sum);
    hopper::products_begin();
    Base::issue_sum(value_sum, weights, shared.grad_output[slot]);
    hopper::products_wait<1>();
    hopper::pin(grads);
    differentiate_scores(packed, grads);
    hopper::pin(packed);
    hopper::pin(key_sum);
    hopper::products_begin();
    Base::issue_sum(key_sum, packed, shared.query[slot]);
    hopper::products_wait<1>();
    hopper::pin(weights);
    hopper::pin(value_sum);
    release(shared.output_empty[slot]);
    hopper::products_wait<0>();
    hopper::pin(key_sum);
    hopper::pin(packed);
  }

  // Turns weights into dS, which this kernel uses for dK, and leaves a copy to the kernel for dQ.
  __device__ __forceinline__ void differentiate_scores(std::uint32_t (&packed)[kPacked],
                                                       const float (&grads)[kScores]) const {
    const std::uint32_t slot = at.slot();
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[slot][i / 2 * 8 + 2 * (lane % 4)]);
      const float2 weight = Base::unpack(packed[i]);
      packed[i] = pack<Element>(weight.x * (grads[2 * i] - delta.x),
                                weight.y * (grads[2 * i + 1] - delta.y));
    }
    if (Base::is_masked()) Base::hide_scores(packed, Base::hidden_bits());
    Base::leave_scores(packed);
  }
};

}  // namespace annulus::flash::backward
