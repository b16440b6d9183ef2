#pragma once

#include <cstdint>
#include <type_traits>

#include "flash/backward/arguments.hpp"
#include "flash/backward/kernels.hpp"
#include "flash/backward/special.cuh"
#include "flash/backward/walk.cuh"
#include "flash/hopper/barrier.cuh"

// The sizes of the main kernel's tiles, the work of a thread block, and its shared memory.
namespace annulus::flash::backward {

/// Tiles of the main kernel. Two warpgroups compute 64 keys each; a third loads.
template <class Element_, int kDim_, PairClass kPairs_ = PairClass::band, bool kSoftCap_ = false>
struct Tiles {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr PairClass kPairs = kPairs_;
  static constexpr int kKeys = 128;
  static constexpr bool kSoftCap = kSoftCap_;
  static constexpr int kQueries = tile_queries(kDim, kPairs);
  static constexpr int kStages = 2;
  static constexpr bool kGeneral = kPairs == PairClass::general;
  static constexpr bool kDrops = kGeneral || kPairs == PairClass::dropout;
  /// How the warpgroups divide the computation of dQ. kSplitsKeys: each sums over its own keys,
  /// into a buffer of its own. kSplitsDims: each computes half of the dims. Neither: half of the
  /// queries.
  static constexpr bool kSplitsKeys = kDim == 64 && kQueries == 64;
  static constexpr bool kSplitsDims = kDim == 128;
  /// Numbers of buffers for dQ and bias; D = 128 leaves little shared memory for them.
  static constexpr int kSumBuffers = kSplitsDims && kGeneral ? 1 : 2;
  static constexpr int kSumWarps = kSplitsKeys ? 4 : 8;  ///< warps that fill a buffer
  static constexpr int kBiasStages = kDim == 128 ? 1 : 2;
  /// Registers of a thread that loads, and of one that computes.
  static constexpr int kFewRegisters = kGeneral ? 40 : 24;
  static constexpr int kManyRegisters = kGeneral ? 232 : 240;
  static constexpr int kThreads = 384;
  // A block begins with 168 registers for each thread.
  static_assert(kFewRegisters + 2 * kManyRegisters <= 3 * 168);
  static constexpr int kTileElements = kQueries * kDim;
  /// In float16, dO, delta, weights and dS are multiplied by factors (see OutputScale).
  static constexpr bool kScalesOutput = std::is_same_v<Element, __half>;
  __device__ static float output_factor(const Arguments& a) {
    return kScalesOutput ? __ldg(&a.output_scale->factor) : 1;
  }
  __device__ static std::int32_t weight_exponent(const Arguments& a) {
    return kScalesOutput ? __ldg(&a.output_scale->weight_exponent) : 0;
  }
  /// The factor that turns dS into the bias's gradient.
  __device__ static float bias_scale(const Arguments& a) {
    return kScalesOutput ? __ldg(&a.output_scale->inverse) : 1;
  }
  /// The factor that turns sums of products into gradients of queries and keys.
  __device__ static float sum_scale(const Arguments& a) { return a.scale * bias_scale(a); }
};

/// The factor that turns sums of products into gradients of values.
template <class Tiles>
__device__ __forceinline__ float value_scale(const Arguments& a) {
  return (Tiles::kDrops ? a.value_scale : 1) * Tiles::bias_scale(a);
}

/// A key tile of one key/value head, and the query tiles that see some of it.
template <class Tiles>
struct Work {
  std::int32_t batch, kv_head, first_column;
  std::int32_t columns;                ///< of the batch: later ones are hidden
  std::int32_t first_tile, last_tile;  ///< inclusive; empty if last < first

  /// `index`: of the thread block.
  __device__ __forceinline__ void find(const Arguments& a, std::int32_t index) {
    const std::int32_t kv_heads = a.heads / a.heads_per_kv_head;
    const std::int32_t all = a.batches * kv_heads;
    const std::int32_t tiles = (a.columns + Tiles::kKeys - 1) / Tiles::kKeys;
    const bool is_rest = index >= all * tiles;
    if (is_rest) index -= all * tiles;
    const std::int32_t first_head = index / (tiles * a.section_heads) * a.section_heads;
    const std::int32_t in_section = index - tiles * first_head;
    const std::int32_t section = min(a.section_heads, all - first_head);
    std::int32_t tile = in_section / section;
    const std::int32_t head = first_head + in_section - tile * section;
    if (a.turns == nullptr && a.mask.key_tile_order != nullptr) {
      tile = a.mask.key_tile_order[tile];
    }
    set(a, head, tile);
    if (index < a.split_items) split(a, index, is_rest);
  }

  /// Keeps the first query tiles of a split item, or the rest. Items of equal work would all begin
  /// and end together, wait for memory together, and leave multiprocessors idle at the end. So the
  /// first blocks, one for each multiprocessor, take shares of their items that grow from almost
  /// none to almost all. The last blocks take the rests, the largest first, as multiprocessors
  /// become free one after another.
  __device__ __forceinline__ void split(const Arguments& a, std::int32_t item, bool is_rest) {
    const std::int32_t steps = last_tile - first_tile + 1;
    const std::int32_t middle = first_tile + steps * (item + 1) / (a.split_items + 1);
    if (is_rest) {
      first_tile = middle;
    } else {
      last_tile = middle - 1;
    }
  }

  /// `pair`: batch · kv heads + kv head.
  __device__ __forceinline__ void set(const Arguments& a, std::int32_t pair, std::int32_t tile) {
    const std::int32_t kv_heads = a.heads / a.heads_per_kv_head;
    batch = pair / kv_heads;
    kv_head = pair - batch * kv_heads;
    first_column = tile * Tiles::kKeys;
    columns = a.column_lengths == nullptr ? a.columns : a.column_lengths[batch];
    const std::int32_t rows = a.row_lengths == nullptr ? a.rows : a.row_lengths[batch];
    const std::int32_t last_column = min(first_column + Tiles::kKeys, columns) - 1;
    const std::int32_t first_row = max(first_column - a.high, 0);
    const std::int32_t last_row = min(last_column - a.low, rows - 1);
    first_tile = first_row / Tiles::kQueries;
    last_tile = last_column < first_column || last_row < first_row ? first_tile - 1
                                                                   : last_row / Tiles::kQueries;
  }

  [[nodiscard]] __device__ __forceinline__ std::int32_t key_tile() const {
    return first_column / Tiles::kKeys;
  }

  /// True if the band or the number of columns hides some pair of a query tile.
  [[nodiscard]] __device__ __forceinline__ bool is_masked(const Arguments& a,
                                                          std::int32_t tile) const {
    const std::int32_t row = tile * Tiles::kQueries;
    return !all_in_band(a, row, row + Tiles::kQueries - 1, first_column,
                        first_column + Tiles::kKeys - 1, columns);
  }

  /// 1 + the key tile whose turn at the query tile precedes this one's; 0 if there is none.
  [[nodiscard]] __device__ __forceinline__ std::int32_t before(const Arguments& a,
                                                               std::int32_t tile) const {
    const std::int32_t first = max(tile * Tiles::kQueries + a.low, 0) / Tiles::kKeys;
    return key_tile() > first ? key_tile() : 0;
  }
};

/// The step that the producer is at, and its place in the ring of tiles.
template <class Tiles>
struct Next {
  Step step;
  RingPosition<Tiles::kStages> at;
};

/// The place of an element in a box of 32 float32 columns, swizzled as TMA does.
[[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_box(std::uint32_t row,
                                                                    std::uint32_t column) {
  return row * 32 + (column / 4 ^ row % 8) * 4 + column % 4;
}

/// Calls use(element, 4i + 2h + j) for the elements in rows `row` + 8i + j and columns `column` +
/// 8h of a box: a product's kElements values of a thread. `row` is even, `column` % 16 < 8.
template <int kElements, class Use>
__device__ __forceinline__ void for_box(float* box, std::uint32_t row, std::uint32_t column,
                                        const Use& use) {
  const std::uint32_t first = place_in_box(row, column);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      // The places of the next row and of the column 8 further on differ from `first` in these
      // bits.
      float* const elements = box + (first ^ (j * (32 + 4)) ^ (h * 8));
#pragma unroll
      for (int i = 0; i < kElements / 4; ++i) use(elements[i * 8 * 32], 4 * i + 2 * h + j);
    }
  }
}

/// Bias or dense mask of tiles: see ScorePreparation.
template <class Tiles>
struct SharedScores {
  /// The bias, one box for every 32 keys. Consumers overwrite it with its gradient. Without a bias,
  /// the dense mask, in one box.
  alignas(1024) float bias[Tiles::kBiasStages][Tiles::kKeys / 32][Tiles::kQueries * 32];
  hopper::Barrier bias_full[Tiles::kBiasStages], bias_read[Tiles::kBiasStages];
  Step bias_step[2][Tiles::kBiasStages];
  std::int32_t in_boxes;  ///< TMA copies the bias and adds its gradient, or copies the mask
};
struct NoSharedScores {};

template <class Tiles>
struct SharedTiles {
  using Element = typename Tiles::Element;
  static constexpr int kSumBoxes = Tiles::kQueries / kBoxRows * Tiles::kDim / 32;
  alignas(1024) Element key[Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element value[Tiles::kKeys * Tiles::kDim];
  alignas(1024) Element query[Tiles::kStages][Tiles::kTileElements];
  alignas(1024) Element grad_output[Tiles::kStages][Tiles::kTileElements];
  /// dSᵀ: for every 64 queries, a row of 128 bytes for each key. Two, so that one barrier per tile
  /// is enough.
  alignas(1024) Element grad_score[2][Tiles::kKeys * Tiles::kQueries];
  /// dQ, in boxes.
  alignas(1024) float grad_query[Tiles::kSumBuffers][kSumBoxes][kBoxRows * 32];
  std::conditional_t<Tiles::kGeneral, SharedScores<Tiles>, NoSharedScores> scores;
  alignas(128) float lse[Tiles::kStages][Tiles::kQueries + kFlagValues];
  alignas(128) float delta[Tiles::kStages][Tiles::kQueries];
  /// In shared memory, so that they take no registers.
  Work<Tiles> work;
  ListPlace list_place;
  Next<Tiles> next;
  Step step[Tiles::kStages];
  Step sum_step[Tiles::kSumBuffers];
  std::int32_t steps;
  std::int32_t special_keys;  ///< keys or values are special
  std::int32_t neighbours;    ///< keys are neighbours in position
  hopper::Barrier key_full, key_watched;
  hopper::Barrier query_full[Tiles::kStages], query_empty[Tiles::kStages];
  hopper::Barrier output_full[Tiles::kStages], output_empty[Tiles::kStages];
  hopper::Barrier sum_full[Tiles::kSumBuffers], sum_empty[Tiles::kSumBuffers];
};

}  // namespace annulus::flash::backward
