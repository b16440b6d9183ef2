#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "flash/backward/pair_bits.cuh"
#include "flash/backward/producer.cuh"
#include "flash/backward/query_walk.cuh"
#include "flash/backward/wide.cuh"

// The common part of the two ways of sharing key tiles of wide heads: shared memory, the copies of
// queries into it, and the hidden pairs of a warpgroup.
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
  /// Bits of pairs that drop, 16 for each query and warp, from the second warpgroup. Free again
  /// when the slot is.
  struct Dropped {
    alignas(16) std::uint16_t of[kStages][4][Tiles::kQueries];
    hopper::Barrier full[kStages];
  };
  struct None {};
  alignas(1024) Element key[kKeyTiles][Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[kKeyTiles][Tiles::kKeys * Tiles::kValueDim];
  alignas(1024) Element query[kStages][Tiles::kTileElements];
  alignas(1024) Element grad_output[kStages][Tiles::kOutputElements];
  std::conditional_t<kKeyTiles == 1, Weights, None> weights;
  std::conditional_t<Tiles::kGeneral, Dropped, None> dropped;
  alignas(128) float lse[kStages][Tiles::kQueries + kFlagValues];
  alignas(128) float delta[kStages][Tiles::kQueries];
  /// Where warps exchange bits of hidden pairs: 16 for each query.
  alignas(16) std::uint16_t hidden[4 * kKeyTiles][Tiles::kQueries];
  Part part;
  Work<typename Tiles::KeyBlock> work;
  QueryWalk<Tiles::kKeys, kKeyTiles> walk;
  QueryStep<kKeyTiles> step[kStages];  ///< tile < 0: there are no more
  std::int32_t score_row;              ///< of the group's query head 0: see score_row()
  /// Indices of the tiles of dS that a step writes, if dQ is wanted: see score_tile().
  std::int32_t score_tile[kStages][kKeyTiles];
  hopper::Barrier key_full;
  hopper::Barrier query_full[kStages], query_empty[kStages];
  hopper::Barrier output_full[kStages], output_empty[kStages];
  Verdict verdict[kStages];

  [[nodiscard]] __device__ __forceinline__ std::int32_t flags(std::uint32_t slot) const {
    return __float_as_int(lse[slot][Tiles::kQueries]);
  }
};
inline constexpr std::int32_t kSpecialQueries = 1, kSpecialOutputs = 2;  ///< bits of a verdict

/// Finds the tiles of dS that a step writes.
template <class Tiles>
__device__ __forceinline__ void find_score_tiles(const Arguments& a, WideKeyMemory<Tiles>& shared,
                                                 std::uint32_t slot) {
  const auto& step = shared.step[slot];
  const auto& work = shared.work;
  const std::int32_t in_group = step.head - work.kv_head * a.heads_per_kv_head;
  const std::int32_t row = shared.score_row + in_group * a.grad_scores.query_tiles + step.tile;
#pragma unroll
  for (int i = 0; i < Tiles::kKeyTiles; ++i) {
    if (step.seen[i] == Seen::nothing) continue;
    shared.score_tile[slot][i] =
        row * a.grad_scores.places + score_place(a, shared.part, work.batch, step.head, step.tile,
                                                 work.first_column / Tiles::kKeys + i);
  }
}

/// Called by one thread.
template <class Tiles>
__device__ __forceinline__ void load_queries(const Arguments& a, WideKeyMemory<Tiles>& shared) {
  using hopper::Cache;
  constexpr std::int32_t kQueries = Tiles::kQueries, kRecord = kQueries + kFlagValues;
  constexpr int kKeyTiles = Tiles::kKeyTiles;
  const auto& work = shared.work;
  RingPosition<WideKeyMemory<Tiles>::kStages> at;
  shared.walk.begin(a, work, shared.part);
  for (QueryStep<kKeyTiles> step; shared.walk.next(a, work, shared.part, step); at.next()) {
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
    shared.query_empty[slot].wait(at.parity() ^ 1);
    shared.step[slot] = step;
    if (a.grad_scores.tiles != nullptr) find_score_tiles(a, shared, slot);
    const std::int64_t first_value =
        (std::int64_t{work.batch} * a.heads + step.head) * a.padded_rows + row;
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

/// Called by the watchers. With a bias or dense mask, prepare_rows() has already looked at all
/// rows.
template <class Tiles>
__device__ __forceinline__ void watch_queries(const Arguments& a, WideKeyMemory<Tiles>& shared) {
  for (RingPosition<WideKeyMemory<Tiles>::kStages> at;; at.next()) {
    const std::uint32_t slot = at.slot();
    shared.query_full[slot].wait(at.parity());
    if (shared.step[slot].tile < 0) return;
    std::int32_t special = 0;
    const std::int32_t flags = shared.flags(slot);
    if (has_scores<Tiles>(a)) {
      if ((flags & kSpecialValues) != 0) special = kSpecialQueries | kSpecialOutputs;
    } else if (shared.step[slot].is_masked() || (flags & kHiddenRows) != 0) {
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
      : Base(arguments), work(memory.work), shared(memory) {
    if constexpr (Tiles::kGeneral) {
      const std::int32_t position =
          a.mask.column_positions[work.first_column + warp % 4 / 2 * 32 + lane];
      const std::int32_t first = __shfl_sync(0xffffffff, position, 0);
      neighbours = __all_sync(0xffffffff, is_neighbour(position, first, lane)) != 0;
    }
  }

  // This warpgroup's key tile.
  [[nodiscard]] __device__ __forceinline__ int key_tile() const {
    return Tiles::kKeyTiles == 1 ? 0 : warp / 4;
  }

  // Waits for the step's queries; false if there are no more.
  [[nodiscard]] __device__ __forceinline__ bool begin_step() {
    // Hides from the compiler that these are the same in every step: it would keep values derived
    // from them in registers.
    asm volatile("" : "+r"(warp), "+r"(lane));
    shared.query_full[at.slot()].wait(at.parity());
    if (shared.step[at.slot()].tile < 0) return false;
    shared.key_full.wait(0);
    return true;
  }

  // True if some pair of the warpgroup may be hidden by something other than a bias.
  [[nodiscard]] __device__ __forceinline__ bool is_masked_without_bias() const {
    return shared.step[at.slot()].seen[key_tile()] == Seen::some ||
           (shared.flags(at.slot()) & kHiddenRows) != 0 ||
           (Tiles::kGeneral && a.scores.mask.data != nullptr);
  }
  // True if some pair of the warpgroup may be hidden.
  [[nodiscard]] __device__ __forceinline__ bool is_masked() const {
    return is_masked_without_bias() || has_scores<Tiles>(a);
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

  // The index of the warp's 16 keys among those of the block.
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
      if constexpr (Tiles::kGeneral) {
        if (a.scores.mask.data != nullptr) {
          seen[i] &= ~hidden_by_mask(a, of.batch, of.head, step.tile * Tiles::kQueries + r,
                                     of.column, neighbours);
        }
      }
      hidden[r] = static_cast<std::uint16_t>(~seen[i]);
    }
    __syncwarp();
  }
  // Bit i: score i is that of a hidden pair. After find_hidden() of a masked step.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t hidden_bits() const {
    return gather_bits(reinterpret_cast<const unsigned char*>(shared.hidden[place_of_warp()]),
                       lane);
  }

  // Marks the hidden pairs of a masked step: their dS becomes −0, and any other −0 becomes 0. The
  // kernel for dQ knows hidden pairs by −0. `hidden` has their bits.
  __device__ __forceinline__ void hide_scores(std::uint32_t (&packed)[Base::kPacked],
                                              std::uint32_t hidden) const {
#pragma unroll
    for (std::uint32_t& pair : packed) pair = Base::plus_zero(pair);
    if (__any_sync(0xffffffff, hidden != 0) == 0) return;
#pragma unroll
    for (int i = 0; i < Base::kPacked; ++i) {
      const std::uint32_t mask = Base::halves(hidden, i);
      packed[i] = (packed[i] & ~mask) | (mask & kNegativeZeros);
    }
  }

  // Leaves dS of the warpgroup to the kernel for dQ, transposed. For each block of 16 queries and
  // 16 keys, a lane stores the registers that the same lane of a warp of that kernel will need.
  __device__ __forceinline__ void leave_scores(const std::uint32_t (&packed)[Base::kPacked]) const {
    if (a.grad_scores.tiles == nullptr) return;
    uint4* const tile =
        score_tile(a, shared.score_tile[at.slot()][key_tile()]) + warp % 4 * 32 + lane;
#pragma unroll
    for (int i = 0; i < Base::kPacked; i += 4) {
      tile[32 * i] = {transposed(packed[i]), transposed(packed[i + 2]), transposed(packed[i + 1]),
                      transposed(packed[i + 3])};
    }
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
  bool neighbours = true;  // in position: this warp's keys and those of the warp that draws with it
};

}  // namespace annulus::flash::backward
