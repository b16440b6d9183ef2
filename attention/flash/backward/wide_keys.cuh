#pragma once

#include <cstddef>
#include <cstdint>

#include "flash/backward/pair_bits.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/wide.cuh"

// dK and dV of wide heads. The sums of 64 keys fill the registers of two warpgroups. The first
// computes weights and dV, the second computes dS and dK.
namespace annulus::flash::backward {

template <class Tiles>
struct WideKeyMemory {
  using Element = typename Tiles::Element;
  static constexpr int kStages = Tiles::kDim == 256 ? 2 : 3;
  alignas(1024) Element key[Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[Tiles::kKeys * Tiles::kValueDim];
  alignas(1024) Element query[kStages][Tiles::kTileElements];
  alignas(1024) Element grad_output[kStages][Tiles::kOutputElements];
  /// Pᵀ times the soft cap's derivative: a row of 128 bytes for each key. Weights of hidden pairs
  /// are −0. Free again when the slot is.
  alignas(1024) Element weights[kStages][Tiles::kKeys * Tiles::kQueries];
  alignas(128) float lse[kStages][Tiles::kQueries + kFlagValues];
  alignas(128) float delta[kStages][Tiles::kQueries];
  /// Where warps exchange bits of hidden pairs: 16 for each query.
  alignas(16) std::uint16_t hidden[4][Tiles::kQueries];
  Work<Tiles> work;
  ListPlace list_place;
  Step step[kStages];  ///< tile < 0: there are no more
  hopper::Barrier key_full;
  hopper::Barrier query_full[kStages], query_empty[kStages];
  hopper::Barrier output_full[kStages], output_empty[kStages];
  hopper::Barrier weights_full[kStages];
  Verdict verdict[kStages];

  /// True if some pair may be hidden.
  [[nodiscard]] __device__ __forceinline__ bool is_masked(std::uint32_t slot) const {
    return step[slot].masked != 0 ||
           (__float_as_int(lse[slot][Tiles::kQueries]) & kHiddenRows) != 0;
  }
};
inline constexpr std::int32_t kSpecialQueries = 1, kSpecialOutputs = 2;  ///< bits of a verdict

/// Called by one thread.
template <class Tiles, class Walk>
__device__ __forceinline__ void load_queries(const Arguments& a, WideKeyMemory<Tiles>& shared,
                                             Walk walk) {
  using hopper::Cache;
  constexpr std::int32_t kQueries = Tiles::kQueries, kRecord = kQueries + kFlagValues;
  const Work<Tiles>& work = shared.work;
  RingPosition<WideKeyMemory<Tiles>::kStages> at;
  for (Step step; walk.next(step); at.next()) {
    if (at.count == 0) {
      shared.key_full.arrive_expecting(Tiles::kKeys * (Tiles::kDim + Tiles::kValueDim) * 2);
      copy_tile<Tiles::kDim>(shared.key, a.key, shared.key_full, Cache::evict_first,
                             work.first_column, work.kv_head, work.batch);
      copy_tile<Tiles::kValueDim>(shared.value, a.value, shared.key_full, Cache::evict_first,
                                  work.first_column, work.kv_head, work.batch);
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
    if (shared.is_masked(slot)) {
      if (watch_tile(shared.query[slot], Tiles::kTileElements)) special |= kSpecialQueries;
      shared.output_full[slot].wait(at.parity());
      if (watch_tile(shared.grad_output[slot], Tiles::kOutputElements)) special |= kSpecialOutputs;
    }
    pass_verdict(shared.verdict[slot], special, shared.query_empty[slot]);
  }
}

template <class Tiles>
class WideKeyConsumer : WideConsumer<Tiles> {
  using Base = WideConsumer<Tiles>;
  using Base::a, Base::kPacked, Base::kScores, Base::lane, Base::release, Base::warp;
  using typename Base::Element;

 public:
  __device__ __forceinline__ WideKeyConsumer(const Arguments& arguments,
                                             WideKeyMemory<Tiles>& memory)
      : Base(arguments), work(memory.work), shared(memory) {}

  /// The first warpgroup's part.
  __device__ __forceinline__ void run_weights() {
    float sum[Tiles::kValueDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    for (; begin_step(); at.next()) add_weights(sum);
    add(a.grad_value, sum, 1);
  }

  /// The second's.
  __device__ __forceinline__ void run_scores() {
    float sum[Tiles::kDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    for (; begin_step(); at.next()) add_scores(sum);
    add(a.grad_key, sum, Tiles::sum_scale(a));
  }

 private:
  // Waits for the step's queries; false if there are no more.
  [[nodiscard]] __device__ __forceinline__ bool begin_step() {
    // Not known to be the same in every step, or what follows from it would fill registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[at.slot()].wait(at.parity());
    if (shared.step[at.slot()].tile < 0) return false;
    shared.key_full.wait(0);
    return true;
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

  // Bits of hidden pairs. A lane examines all 16 keys of its warp for two rows.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_hidden(const Rows& rows) const {
    const Step& step = shared.step[at.slot()];
    std::uint16_t* const hidden = shared.hidden[warp % 4];
    const WarpScores of{work.batch, step.head, work.first_column + warp % 4 * 16, lane,
                        reinterpret_cast<unsigned char*>(hidden)};
    std::uint32_t seen[2] = {0xffff, 0xffff};
    if (step.masked != 0 && a.mask.key_tiles > 0) {
      const ListedColumns columns(a, of, Tiles::kKeys);
#pragma unroll
      for (int i = 0; i < 2; ++i) seen[i] = columns.seen_by(rows[i]);
    } else if (step.masked != 0) {
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
    const std::uint32_t bits = gather_bits(of.own, lane);
    __syncwarp();
    return bits;
  }

  // Where matrix l / 8 of this lane l has its row l % 8: keys 0 and 8, queries 0 and 8 from
  // `query` on.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t weight_address(int query) const {
    const int key = warp % 4 * 16 + lane % 16;
    const int chunk = (query / 8 + lane / 16) ^ (key % 8);
    return hopper::shared_address(shared.weights[at.slot()]) + key * 128 + chunk * 16;
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
    const bool masked = shared.is_masked(slot);
    Rows rows;
    if (masked && a.mask.key_tiles > 0) read_rows(rows);
    float scores[kScores];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kDim>(scores, shared.key, shared.query[slot]);
    const std::uint32_t hidden = masked ? find_hidden(rows) : 0;
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
    release(shared.weights_full[slot]);
    release(shared.query_empty[slot]);
    shared.output_full[slot].wait(at.parity());
    if (masked && (shared.verdict[slot].wait(at.parity()) & kSpecialOutputs) != 0) {
      Base::add_visible(sum, weights, hidden, shared.grad_output[slot]);
    } else {
      hopper::pin(weights);
      hopper::pin(sum);
      hopper::products_begin();
      Base::issue_sum(sum, weights, shared.grad_output[slot]);
      hopper::products_wait<0>();
      hopper::pin(sum);
      hopper::pin(weights);
    }
    release(shared.output_empty[slot]);
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(float (&sum)[kSums]) {
    const std::uint32_t slot = at.slot();
    float grads[kScores];
    hopper::leave_undefined(grads);
    shared.output_full[slot].wait(at.parity());
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.value, shared.grad_output[slot]);
    hopper::products_wait<0>();
    hopper::pin(grads);
    shared.weights_full[slot].wait(at.parity());
    std::uint32_t packed[kPacked];
    load_weights(packed);
    const bool masked = shared.is_masked(slot);
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
    if (special) {
      Base::add_visible(sum, packed, hidden, shared.query[slot]);
    } else {
      hopper::pin(packed);
      hopper::pin(sum);
      hopper::products_begin();
      Base::issue_sum(sum, packed, shared.query[slot]);
      hopper::products_wait<0>();
      hopper::pin(sum);
      hopper::pin(packed);
    }
    release(shared.query_empty[slot]);
  }

  template <int kSums>
  __device__ __forceinline__ void add(const Gradient& to, const float (&sum)[kSums],
                                      float factor) const {
    if (to.data == nullptr || at.count == 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t column = work.first_column + Base::first_row() + 8 * h;
      if (column < work.columns) {
        add_sums(to, work.batch, column, work.kv_head, sum, h, factor);
      }
    }
  }

  const Work<Tiles>& work;
  WideKeyMemory<Tiles>& shared;
  RingPosition<WideKeyMemory<Tiles>::kStages> at;
};

/// dK and dV of a key tile and a key/value head.
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
      shared.weights_full[i].init(4);
      shared.verdict[i].known.init(kWatchers);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (a.mask.key_tiles == 0 && shared.work.last_tile < shared.work.first_tile) return;
  if (threadIdx.x < 128) {
    hopper::release_registers<40>();
    if (threadIdx.x >= 32) watch_queries(shared);
    if (threadIdx.x != 0) return;
    if (a.mask.key_tiles > 0) {
      load_queries(a, shared, ListWalk<Work<Tiles>>(a, shared.work, shared.list_place));
    } else {
      load_queries(a, shared, BandWalk<Work<Tiles>>(a, shared.work, shared.list_place));
    }
  } else {
    hopper::take_registers<232>();
    WideKeyConsumer<Tiles> consumer(a, shared);
    if (threadIdx.x < 256) {
      consumer.run_weights();
    } else {
      consumer.run_scores();
    }
  }
}

}  // namespace annulus::flash::backward
