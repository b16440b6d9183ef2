#pragma once

#include <cstddef>
#include <cstdint>

#include "flash/backward/pair_bits.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/query_walk.cuh"
#include "flash/backward/wide.cuh"

// dK and dV of wide heads. At 192/128, each of two warpgroups has a key tile. At 256, the sums of
// 64 keys fill the registers of both: the first computes weights and dV, the second computes dS and
// dK.
namespace annulus::flash::backward {

template <class Tiles>
struct WideKeyMemory {
  using Element = typename Tiles::Element;
  static constexpr int kKeyTiles = Tiles::kKeyTiles;
  static constexpr int kStages = Tiles::kDim == 256 ? 2 : 3;
  /// Pᵀ times the soft cap's derivative, for the second warpgroup: a row of 128 bytes for each key.
  /// Weights of hidden pairs are −0. Free again when the slot is.
  struct Weights {
    alignas(1024) Element of[kStages][Tiles::kKeys * Tiles::kQueries];
    hopper::Barrier full[kStages];
  };
  struct None {};
  alignas(1024) Element key[kKeyTiles][Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[kKeyTiles][Tiles::kKeys * Tiles::kValueDim];
  alignas(1024) Element query[kStages][Tiles::kTileElements];
  alignas(1024) Element grad_output[kStages][Tiles::kOutputElements];
  std::conditional_t<kKeyTiles == 1, Weights, None> weights;
  alignas(128) float lse[kStages][Tiles::kQueries + kFlagValues];
  alignas(128) float delta[kStages][Tiles::kQueries];
  /// Where warps exchange bits of hidden pairs: 16 for each query.
  alignas(16) std::uint16_t hidden[4 * kKeyTiles][Tiles::kQueries];
  Work<typename Tiles::KeyBlock> work;
  QueryWalk<Tiles::kKeys, kKeyTiles> walk;
  QueryStep<kKeyTiles> step[kStages];  ///< tile < 0: there are no more
  hopper::Barrier key_full;
  hopper::Barrier query_full[kStages], query_empty[kStages];
  hopper::Barrier output_full[kStages], output_empty[kStages];
  Verdict verdict[kStages];

  [[nodiscard]] __device__ __forceinline__ bool has_hidden_rows(std::uint32_t slot) const {
    return (__float_as_int(lse[slot][Tiles::kQueries]) & kHiddenRows) != 0;
  }
};
inline constexpr std::int32_t kSpecialQueries = 1, kSpecialOutputs = 2;  ///< bits of a verdict

/// Called by one thread.
template <class Tiles>
__device__ __forceinline__ void load_queries(const Arguments& a, WideKeyMemory<Tiles>& shared) {
  using hopper::Cache;
  constexpr std::int32_t kQueries = Tiles::kQueries, kRecord = kQueries + kFlagValues;
  constexpr int kKeyTiles = Tiles::kKeyTiles;
  const auto& work = shared.work;
  RingPosition<WideKeyMemory<Tiles>::kStages> at;
  shared.walk.begin(a, work);
  for (QueryStep<kKeyTiles> step; shared.walk.next(a, work, step); at.next()) {
    if (at.count == 0) {
      shared.key_full.arrive_expecting(kKeyTiles * Tiles::kKeys * (Tiles::kDim + Tiles::kValueDim) *
                                       2);
      for (int i = 0; i < kKeyTiles; ++i) {
        const std::int32_t column = work.first_column + i * Tiles::kKeys;
        copy_tile<Tiles::kDim>(shared.key[i], a.key, shared.key_full, Cache::evict_first, column,
                               work.kv_head, work.batch);
        copy_tile<Tiles::kValueDim>(shared.value[i], a.value, shared.key_full, Cache::evict_first,
                                    column, work.kv_head, work.batch);
      }
    }
    const std::uint32_t slot = at.slot();
    const std::int32_t row = step.tile * kQueries;
    const std::int64_t first_value =
        (std::int64_t{work.batch} * a.heads + step.head) * a.padded_rows + row;
    shared.query_empty[slot].wait(at.parity() ^ 1);
    shared.step[slot] = step;
    shared.query_full[slot].arrive_expecting(Tiles::kTileElements * 2 + kRecord * 4);
    copy_tile<Tiles::kDim>(shared.query[slot], a.query, shared.query_full[slot], Cache::evict_last,
                           row, step.head, work.batch);
    copy_bytes(shared.lse[slot], a.scaled_lse + first_value / kQueries * kRecord, kRecord * 4,
               shared.query_full[slot]);
    shared.output_empty[slot].wait(at.parity() ^ 1);
    shared.output_full[slot].arrive_expecting(Tiles::kOutputElements * 2 + kQueries * 4);
    copy_tile<Tiles::kValueDim>(shared.grad_output[slot], a.grad_output, shared.output_full[slot],
                                Cache::evict_last, row, step.head, work.batch);
    copy_bytes(shared.delta[slot], a.padded_delta + first_value, kQueries * 4,
               shared.output_full[slot]);
  }
  shared.query_empty[at.slot()].wait(at.parity() ^ 1);
  shared.step[at.slot()].tile = -1;
  shared.query_full[at.slot()].arrive();
}

/// Called by the watchers.
template <class Tiles>
__device__ __forceinline__ void watch_queries(WideKeyMemory<Tiles>& shared) {
  for (RingPosition<WideKeyMemory<Tiles>::kStages> at;; at.next()) {
    const std::uint32_t slot = at.slot();
    shared.query_full[slot].wait(at.parity());
    if (shared.step[slot].tile < 0) return;
    std::int32_t special = 0;
    if (shared.step[slot].is_masked() || shared.has_hidden_rows(slot)) {
      if (watch_tile(shared.query[slot], Tiles::kTileElements)) special |= kSpecialQueries;
      shared.output_full[slot].wait(at.parity());
      if (watch_tile(shared.grad_output[slot], Tiles::kOutputElements)) special |= kSpecialOutputs;
    }
    pass_verdict(shared.verdict[slot], special, shared.query_empty[slot]);
  }
}

/// The common part of the computing warpgroups.
template <class Tiles>
class WideKeyConsumer : protected WideConsumer<Tiles> {
 protected:
  using Base = WideConsumer<Tiles>;
  using Base::a, Base::lane, Base::release, Base::warp;
  using Memory = WideKeyMemory<Tiles>;

  __device__ __forceinline__ WideKeyConsumer(const Arguments& arguments, Memory& memory)
      : Base(arguments), work(memory.work), shared(memory) {}

  // This warpgroup's key tile.
  [[nodiscard]] __device__ __forceinline__ int key_tile() const {
    return Tiles::kKeyTiles == 1 ? 0 : warp / 4;
  }

  // Waits for the step's queries; false if there are no more.
  [[nodiscard]] __device__ __forceinline__ bool begin_step() {
    // Not known to be the same in every step, or what follows from it would fill registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[at.slot()].wait(at.parity());
    if (shared.step[at.slot()].tile < 0) return false;
    shared.key_full.wait(0);
    return true;
  }

  // True if some pair of the warpgroup may be hidden.
  [[nodiscard]] __device__ __forceinline__ bool is_masked() const {
    return shared.step[at.slot()].seen[key_tile()] == Seen::some ||
           shared.has_hidden_rows(at.slot());
  }

  // The rows of a masked listed tile that a lane examines: lane and lane + 32.
  using Rows = ListedRow[2];
  __device__ __forceinline__ void read_rows(Rows& rows) const {
    const std::int32_t row = shared.step[at.slot()].tile * Tiles::kQueries + lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = ListedRow(a, work.batch, Tiles::kQueries, row + 32 * i);
    }
  }

  // Bit k: the band shows column `first` + k of 16 to a row.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t seen_in_band(std::int32_t row,
                                                                      std::int32_t first) const {
    const std::int32_t begin = max(row + a.low - first, 0);
    const std::int32_t end = min(min(row + a.high + 1, work.columns) - first, 16);
    return begin < end ? (1U << end) - (1U << begin) : 0;
  }

  // The number of the warp's keys, 16 at a time.
  [[nodiscard]] __device__ __forceinline__ int place_of_warp() const {
    return Tiles::kKeyTiles == 1 ? warp % 4 : warp;
  }

  // Finds the hidden pairs of a masked step. A lane examines all 16 keys of its warp for two rows.
  __device__ __forceinline__ void find_hidden(const Rows& rows) const {
    const auto& step = shared.step[at.slot()];
    std::uint16_t* const hidden = shared.hidden[place_of_warp()];
    const WarpScores of{work.batch, step.head, work.first_column + place_of_warp() * 16, lane,
                        reinterpret_cast<unsigned char*>(hidden)};
    std::uint32_t seen[2] = {0xffff, 0xffff};
    __syncwarp();  // all have read the bits of the step before
    const bool masked = step.seen[key_tile()] == Seen::some;
    if (masked && a.mask.key_tiles > 0) {
      const ListedColumns columns(a, of, Tiles::kKeys);
#pragma unroll
      for (int i = 0; i < 2; ++i) seen[i] = columns.seen_by(rows[i]);
    } else if (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        seen[i] = seen_in_band(step.tile * Tiles::kQueries + lane + 32 * i, of.column);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane + 32 * i;
      if (shared.lse[at.slot()][r] == kInfinity) seen[i] = 0;
      hidden[r] = static_cast<std::uint16_t>(~seen[i]);
    }
    __syncwarp();
  }
  // Bit i: score i is that of a hidden pair. After find_hidden() of a masked step.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t hidden_bits() const {
    return gather_bits(reinterpret_cast<const unsigned char*>(shared.hidden[place_of_warp()]),
                       lane);
  }

  template <int kSums>
  __device__ __forceinline__ void add(const Gradient& to, const float (&sum)[kSums],
                                      float factor) const {
    if (to.data == nullptr || at.count == 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t column =
          work.first_column + key_tile() * Tiles::kKeys + Base::first_row() + 8 * h;
      if (column < work.columns) {
        add_sums(to, work.batch, column, work.kv_head, sum, h, factor);
      }
    }
  }

  const Work<typename Tiles::KeyBlock>& work;
  Memory& shared;
  RingPosition<Memory::kStages> at;
};

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
    Base::add(a.grad_value, sum, 1);
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
    Base::add(a.grad_value, value_sum, 1);
  }

 private:
  __device__ __forceinline__ void hide(std::uint32_t (&weights)[kPacked]) const {
    const std::uint32_t hidden = Base::hidden_bits();
#pragma unroll
    for (int i = 0; i < kPacked; ++i) weights[i] &= ~Base::halves(hidden, i);
  }

  // Values that are needed again are read again, as the sums leave few registers.
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
    std::uint32_t weights[kPacked];
    Base::weigh(scores, weights, [&](int n, int) {
      return *reinterpret_cast<const float2*>(&shared.lse[slot][8 * n + 2 * (lane % 4)]);
    });
    shared.output_full[slot].wait(at.parity());
    const auto hidden = [&] { return Base::hidden_bits(); };
    bool special = false;
    if (Base::is_masked()) {
      hide(weights);
      special = (shared.verdict[slot].wait(at.parity()) & kSpecialOutputs) != 0;
    }
    // The weights are added later together with dS, unless the soft cap's derivative has to take
    // their place.
    const bool added = special || a.soft_cap != 0;
    if (added) Base::add_to(value_sum, weights, shared.grad_output[slot], special, hidden);
    if (a.soft_cap != 0) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) {
        weights[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
      }
    }
    float grads[kScores];
    hopper::leave_undefined(grads);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.value[Base::key_tile()],
                                                  shared.grad_output[slot]);
    hopper::products_wait<0>();
    hopper::pin(grads);
    const float scale = Tiles::score_scale(a);
    std::uint32_t packed[kPacked];
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      const float2 delta =
          *reinterpret_cast<const float2*>(&shared.delta[slot][i / 2 * 8 + 2 * (lane % 4)]);
      const float2 weight = Base::unpack(weights[i]);
      packed[i] = pack<Element>(weight.x * fmaf(grads[2 * i], scale, -delta.x),
                                weight.y * fmaf(grads[2 * i + 1], scale, -delta.y));
    }
    special = false;
    if (Base::is_masked()) {
      hide(packed);
      special = (shared.verdict[slot].wait(at.parity()) & kSpecialQueries) != 0;
    }
    if (added || special) {
      if (!added) Base::add_to(value_sum, weights, shared.grad_output[slot], false, hidden);
      release(shared.output_empty[slot]);
      Base::add_to(key_sum, packed, shared.query[slot], special, hidden);
      return;
    }
    hopper::pin(weights);
    hopper::pin(value_sum);
    hopper::pin(packed);
    hopper::pin(key_sum);
    hopper::products_begin();
    Base::issue_sum(value_sum, weights, shared.grad_output[slot]);
    Base::issue_sum(key_sum, packed, shared.query[slot]);
    hopper::products_wait<1>();
    hopper::pin(weights);
    hopper::pin(value_sum);
    release(shared.output_empty[slot]);
    hopper::products_wait<0>();
    hopper::pin(key_sum);
    hopper::pin(packed);
  }
};

/// dK and dV of one or two key tiles of a key/value head.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate_wide_keys(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<WideKeyMemory<Tiles>*>(bytes);
  if (threadIdx.x == 0) {
    shared.work.find(a, static_cast<std::int32_t>(blockIdx.x));
    shared.key_full.init(1);
    for (int i = 0; i < WideKeyMemory<Tiles>::kStages; ++i) {
      shared.query_full[i].init(1);
      shared.output_full[i].init(1);
      shared.query_empty[i].init(8 + kWatchers);
      shared.output_empty[i].init(8);
      if constexpr (Tiles::kKeyTiles == 1) shared.weights.full[i].init(4);
      shared.verdict[i].known.init(kWatchers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (a.mask.key_tiles == 0 && shared.work.last_tile < shared.work.first_tile) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<Tiles::kFewRegisters>();
    if (threadIdx.x >= 32) watch_queries(shared);
    if (threadIdx.x == 0) load_queries(a, shared);
  } else {
    hopper::take_registers<Tiles::kManyRegisters>();
    using Consumer =
        std::conditional_t<Tiles::kKeyTiles == 1, SplitKeyConsumer<Tiles>, WholeKeyConsumer<Tiles>>;
    Consumer(a, shared).run();
  }
}

}  // namespace annulus::flash::backward
