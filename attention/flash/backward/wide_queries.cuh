#pragma once

#include <cstddef>
#include <cstdint>

#include "flash/backward/dropout.cuh"
#include "flash/backward/key_walk.cuh"
#include "flash/backward/pair_bits.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/wide.cuh"

// dQ of wide heads, in the manner of a forward pass: each of two warpgroups has a query tile, whose
// sums stay in registers while key tiles pass by.
namespace annulus::flash::backward {

template <class Tiles>
struct WideQueryMemory {
  using Element = typename Tiles::Element;
  static constexpr int kKeyStages = Tiles::kDim == 256 ? 2 : 3;
  static constexpr int kValueStages = Tiles::kDim == 256 ? 1 : 3;
  alignas(1024) Element query[2][Tiles::kTileElements];
  alignas(1024) Element grad_output[2][Tiles::kOutputElements];
  alignas(1024) Element key[kKeyStages][Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[kValueStages][Tiles::kKeys * Tiles::kValueDim];
  /// Positions and segment ids of the columns: of masked tiles of lists, in the general class of
  /// all tiles.
  alignas(128) std::int32_t column_positions[kKeyStages][Tiles::kKeys];
  alignas(128) std::int32_t column_ids[kKeyStages][Tiles::kKeys];
  std::int32_t batch, head;
  std::int32_t first_tile;      ///< the warpgroups have this query tile and the next
  std::int32_t columns;         ///< of the batch
  KeyStep<2> step[kKeyStages];  ///< tile < 0: there are no more
  hopper::Barrier rows_full;
  hopper::Barrier key_full[kKeyStages], key_empty[kKeyStages];
  hopper::Barrier value_full[kValueStages], value_empty[kValueStages];
  Verdict verdict[kKeyStages];  ///< not 0: keys are special

  /// True if some pair of a step is hidden.
  [[nodiscard]] __device__ __forceinline__ static bool is_masked(const KeyStep<2>& step) {
    return step.seen[0] == Seen::some || step.seen[1] == Seen::some;
  }

  /// Blocks with many key tiles come first, if the mask is causal. Query heads that share keys, and
  /// all heads of a section, run together.
  __device__ __forceinline__ void find(const Arguments& a, std::int32_t index) {
    const std::int32_t all = a.batches * a.heads;
    const std::int32_t pairs = (a.padded_rows / Tiles::kQueries + 1) / 2;
    const std::int32_t heads = a.section_heads * a.heads_per_kv_head;
    const std::int32_t first_head = index / (pairs * heads) * heads;
    const std::int32_t in_section = index - pairs * first_head;
    const std::int32_t section = min(heads, all - first_head);
    const std::int32_t pair = in_section / section;
    first_tile = 2 * (pairs - 1 - pair);
    head = first_head + in_section - pair * section;
    batch = head / a.heads;
    head -= batch * a.heads;
    columns = a.column_lengths == nullptr ? a.columns : a.column_lengths[batch];
  }
};

/// Starts to copy what rows compare the columns of a masked tile by.
template <class Tiles>
__device__ __forceinline__ void copy_columns(const Arguments& a, WideQueryMemory<Tiles>& shared,
                                             std::uint32_t slot, std::int32_t column) {
  constexpr std::int32_t kBytes = Tiles::kKeys * 4;
  const TileMask& mask = a.mask;
  hopper::Barrier& full = shared.key_full[slot];
  const bool ids = mask.column_ids != nullptr;
  expect_bytes(full, kBytes * (ids ? 2 : 1));
  copy_bytes(shared.column_positions[slot], mask.column_positions + column, kBytes, full);
  if (!ids) return;
  const std::int64_t of_batch =
      mask.batches > 1 ? std::int64_t{shared.batch} * mask.key_tiles * Tiles::kKeys : 0;
  copy_bytes(shared.column_ids[slot], mask.column_ids + of_batch + column, kBytes, full);
}

/// Called by one thread.
template <class Tiles>
__device__ __forceinline__ void load_keys(const Arguments& a, WideQueryMemory<Tiles>& shared) {
  using hopper::Cache;
  using Memory = WideQueryMemory<Tiles>;
  const std::int32_t batch = shared.batch, kv_head = shared.head / a.heads_per_kv_head;
  RingPosition<Memory::kKeyStages> at;
  RingPosition<Memory::kValueStages> at_value;
  KeyWalk<Tiles::kKeys, 2> walk(a, batch, shared.head, shared.first_tile);
  for (KeyStep<2> step; walk.next(step); at.next(), at_value.next()) {
    if (at.count == 0) {
      shared.rows_full.arrive_expecting(2 * (Tiles::kTileElements + Tiles::kOutputElements) * 2);
      for (int i = 0; i < 2; ++i) {
        const std::int32_t row = (shared.first_tile + i) * Tiles::kQueries;
        copy_tile<Tiles::kDim>(shared.query[i], a.query, shared.rows_full, Cache::evict_first, row,
                               shared.head, batch);
        copy_tile<Tiles::kValueDim>(shared.grad_output[i], a.grad_output, shared.rows_full,
                                    Cache::evict_first, row, shared.head, batch);
      }
    }
    const std::int32_t column = step.tile * Tiles::kKeys;
    const std::uint32_t slot = at.slot(), value_slot = at_value.slot();
    shared.key_empty[slot].wait(at.parity() ^ 1);
    shared.step[slot] = step;
    const bool compares = Memory::is_masked(step) || Tiles::kGeneral;
    if (a.mask.key_tiles > 0 && compares) copy_columns(a, shared, slot, column);
    shared.key_full[slot].arrive_expecting(Tiles::kKeys * Tiles::kDim * 2);
    copy_tile<Tiles::kDim>(shared.key[slot], a.key, shared.key_full[slot], Cache::evict_last,
                           column, kv_head, batch);
    shared.value_empty[value_slot].wait(at_value.parity() ^ 1);
    shared.value_full[value_slot].arrive_expecting(Tiles::kKeys * Tiles::kValueDim * 2);
    copy_tile<Tiles::kValueDim>(shared.value[value_slot], a.value, shared.value_full[value_slot],
                                Cache::evict_last, column, kv_head, batch);
  }
  shared.key_empty[at.slot()].wait(at.parity() ^ 1);
  shared.step[at.slot()].tile = -1;
  shared.key_full[at.slot()].arrive();
}

/// Called by the watchers.
template <class Tiles>
__device__ __forceinline__ void watch_keys(const Arguments& a, WideQueryMemory<Tiles>& shared) {
  using Memory = WideQueryMemory<Tiles>;
  for (RingPosition<Memory::kKeyStages> at;; at.next()) {
    const std::uint32_t slot = at.slot();
    shared.key_full[slot].wait(at.parity());
    const KeyStep<2>& step = shared.step[slot];
    if (step.tile < 0) return;
    const bool special = (Memory::is_masked(step) || has_scores<Tiles>(a)) &&
                         watch_tile(shared.key[slot], Tiles::kKeys * Tiles::kDim);
    pass_verdict(shared.verdict[slot], special ? 1 : 0, shared.key_empty[slot]);
  }
}

template <class Tiles>
class WideQueryConsumer : WideConsumer<Tiles> {
  using Base = WideConsumer<Tiles>;
  using Memory = WideQueryMemory<Tiles>;
  using Base::a, Base::kGeneral, Base::kPacked, Base::kScores, Base::lane, Base::release,
      Base::warp;

 public:
  __device__ __forceinline__ WideQueryConsumer(const Arguments& arguments, Memory& memory)
      : Base(arguments), shared(memory) {
    group = warp / 4;
    const std::int32_t tile = shared.first_tile + group;
    row = tile * Tiles::kQueries + Base::first_row();
    lse[0] = lse[1] = kInfinity;
    delta[0] = delta[1] = 0;
    if (row >= a.padded_rows) return;
    const std::int64_t of_head =
        std::int64_t{shared.batch * a.heads + shared.head} * (a.padded_rows / Tiles::kQueries);
    const float* const record =
        a.scaled_lse + (of_head + tile) * (Tiles::kQueries + kFlagValues) + Base::first_row();
    const float* const deltas =
        a.padded_delta + (of_head + tile) * Tiles::kQueries + Base::first_row();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      lse[h] = record[8 * h];
      delta[h] = deltas[8 * h];
    }
  }

  __device__ __forceinline__ void run() {
    float sum[Tiles::kDim / 2];
#pragma unroll
    for (float& x : sum) x = 0;
    while (true) {
      // Not known to be the same in every step, or what follows from it would fill registers.
      asm volatile("" : "+r"(warp), "+r"(lane));
      shared.key_full[at.slot()].wait(at.parity());
      const KeyStep<2>& step = shared.step[at.slot()];
      if (step.tile < 0) break;
      shared.rows_full.wait(0);
      const Seen seen = step.seen[group];
      if (seen != Seen::nothing) {
        add_scores(sum, seen == Seen::some);
      } else {
        shared.value_full[at_value.slot()].wait(at_value.parity());
        release(shared.value_empty[at_value.slot()]);
      }
      release(shared.key_empty[at.slot()]);
      at.next();
      at_value.next();
    }
    if (at.count == 0 || a.grad_query.data == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lse[h] == kInfinity) continue;
      add_sums(a.grad_query, shared.batch, row + 8 * h, shared.head, sum, h, Tiles::sum_scale(a));
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_hidden(
      const ListedRow (&rows)[2]) const {
    const std::uint32_t slot = at.slot();
    const std::int32_t column = shared.step[slot].tile * Tiles::kKeys;
    if (a.mask.key_tiles > 0) {
      return Base::hidden_bits([&](int key, int h) {
        return rows[h].sees(a, shared.batch, shared.head,
                            {shared.column_positions[slot][key], shared.column_ids[slot][key]});
      });
    }
    return Base::hidden_bits([&](int key, int h) {
      const std::int32_t distance = column + key - row - 8 * h;
      return column + key < shared.columns && distance >= a.low && distance <= a.high;
    });
  }

  // The bits of the thread's scores, of which of(row, first column) returns those of a row and 32
  // columns of the tile. Each lane asks for one row's.
  template <class Of>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t bits_of_rows(const Of& of) const {
    const std::uint32_t word = of(row - lane / 4 + lane % 16, lane / 16 * 32);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i % 2, half = i / 2;
      std::uint32_t mine = __shfl_sync(0xffffffff, word, lane / 4 + 8 * h + 16 * half);
      mine = mine >> lane % 4 * 2 & 0x03030303U;
      mine = (mine | mine >> 4U) & 0x00330033U;
      mine = (mine | mine >> 8U) & 0x3333U;
      bits |= mine << (16 * half + 2 * h);
    }
    return bits;
  }

  [[nodiscard]] __device__ __forceinline__ std::int32_t first_column() const {
    return shared.step[at.slot()].tile * Tiles::kKeys;
  }
  // True if the tile's keys are neighbours in position.
  [[nodiscard]] __device__ __forceinline__ bool are_neighbours() const {
    const std::int32_t* const positions = shared.column_positions[at.slot()];
    return __all_sync(0xffffffff,
                      is_neighbour(positions[lane], positions[0], lane) &&
                          is_neighbour(positions[lane + 32], positions[0], lane + 32)) != 0;
  }
  // Bits of pairs that the dense mask hides, and of pairs that drop.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_masked() const {
    const bool neighbours = are_neighbours();
    return bits_of_rows([&](std::int32_t of_row, std::int32_t column) {
      const auto hidden = [&](std::int32_t first) {
        return hidden_by_mask(a, shared.batch, shared.head, of_row, first_column() + first,
                              neighbours);
      };
      return hidden(column) & 0xffffU | hidden(column + 16) << 16U;
    });
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t draw() const {
    const bool neighbours = are_neighbours();
    return bits_of_rows([&](std::int32_t of_row, std::int32_t column) {
      return draw_row<2>(a, {shared.batch, shared.head, of_row, first_column() + column},
                         neighbours);
    });
  }

  // Calls use(entry, score) for the thread's entries in a tensor like the bias. Rows and columns
  // past the end have other entries.
  template <class T, class Use>
  __device__ __forceinline__ void for_entries(T* data, const std::int64_t (&strides)[4],
                                              const Use& use) const {
    data += shared.batch * strides[0] + shared.head * strides[1];
    const std::int32_t* const positions = shared.column_positions[at.slot()];
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const int k = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const bool exists = positions[k] != TileMask::kNowhere;
      const std::int32_t column = first_column() + k;
      T* const of_key =
          data +
          a.scores.key_of(exists ? column : first_column(), positions[exists ? k : 0]) * strides[3];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        use(of_key + min(row + 8 * h, a.rows - 1) * strides[2], i / 2 * 4 + 2 * h + i % 2);
      }
    }
  }

  // Adds dS of visible pairs to the bias's gradient.
  __device__ __forceinline__ void add_bias_gradient(const float (&grads)[kScores],
                                                    std::uint32_t hidden) const {
    for_entries(a.grad_bias, a.grad_bias_strides, [&](float* entry, int i) {
      if ((hidden >> i & 1) != 0 || lse[i / 2 % 2] == kInfinity) return;
      atomicAdd(entry, Tiles::bias_scale(a) * grads[i]);
    });
  }

  template <int kSums>
  __device__ __forceinline__ void add_scores(float (&sum)[kSums], bool masked) {
    const std::uint32_t slot = at.slot(), value_slot = at_value.slot();
    ListedRow rows[2];
    if (masked && a.mask.key_tiles > 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows[h] = ListedRow(a, shared.batch, Tiles::kQueries, row + 8 * h);
      }
    }
    float scores[kScores], grads[kScores];
    std::uint32_t packed[kPacked];
    hopper::leave_undefined(scores);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kDim>(scores, shared.query[group], shared.key[slot]);
    std::uint32_t hidden = masked ? find_hidden(rows) : 0, dropped = 0;
    if constexpr (kGeneral) {
      if (a.scores.mask.data != nullptr) hidden |= find_masked();
      if (a.dropout.threshold != 0) dropped = draw();
      if (a.scores.bias.data != nullptr) {
        float bias[kScores];
        for_entries(a.scores.bias.data, a.scores.bias.strides,
                    [&](const float* entry, int i) { bias[i] = __ldg(entry); });
        hopper::products_wait<0>();
        hopper::pin(scores);
        Base::add_bias(scores, bias, hidden);
      } else {
        hopper::products_wait<0>();
        hopper::pin(scores);
      }
    }
    shared.value_full[value_slot].wait(at_value.parity());
    hopper::leave_undefined(grads);
    hopper::products_begin();
    Base::template issue_scores<Tiles::kValueDim>(grads, shared.grad_output[group],
                                                  shared.value[value_slot]);
    if constexpr (!kGeneral) {
      hopper::products_wait<1>();
      hopper::pin(scores);
    }
    Base::weigh(scores, packed, [&](int, int h) { return float2{lse[h], lse[h]}; });
    hopper::products_wait<0>();
    hopper::pin(grads);
    release(shared.value_empty[value_slot]);
    if constexpr (kGeneral) {
      if (a.dropout.threshold != 0) drop(grads, dropped);
    }
    const float scale = Base::grad_factor();
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= fmaf(grads[i], scale, -delta[i / 2 % 2]);
    if constexpr (kGeneral) {
      if (a.grad_bias != nullptr) add_bias_gradient(scores, hidden);
    }
#pragma unroll
    for (int i = 0; i < kPacked; ++i) {
      packed[i] = pack<typename Tiles::Element>(scores[2 * i], scores[2 * i + 1]);
    }
    bool special = false;
    if (masked || has_scores<Tiles>(a)) {
#pragma unroll
      for (int i = 0; i < kPacked; ++i) packed[i] &= ~Base::halves(hidden, i);
      special = shared.verdict[slot].wait(at.parity()) != 0;
    }
    Base::add_to(sum, packed, shared.key[slot], special, [&] { return hidden; });
  }

  Memory& shared;
  RingPosition<Memory::kKeyStages> at;
  RingPosition<Memory::kValueStages> at_value;
  int group;
  std::int32_t row;  // the first of two, 8 apart
  float lse[2], delta[2];
};

/// dQ of two query tiles of a head.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    differentiate_wide_queries(const __grid_constant__ Arguments a) {
  using Memory = WideQueryMemory<Tiles>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Memory*>(bytes);
  if (threadIdx.x == 0) {
    shared.find(a, static_cast<std::int32_t>(blockIdx.x));
    shared.rows_full.init(1);
    for (int i = 0; i < Memory::kKeyStages; ++i) {
      shared.key_full[i].init(1);
      shared.key_empty[i].init(8 + kWatchers);
      shared.verdict[i].known.init(kWatchers);
    }
    for (int i = 0; i < Memory::kValueStages; ++i) {
      shared.value_full[i].init(1);
      shared.value_empty[i].init(8);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::release_registers<40>();
    if (threadIdx.x >= 32) watch_keys(a, shared);
    if (threadIdx.x == 0) load_keys(a, shared);
  } else {
    hopper::take_registers<232>();
    WideQueryConsumer<Tiles>(a, shared).run();
  }
}

}  // namespace annulus::flash::backward
