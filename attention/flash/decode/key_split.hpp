#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ANNULUS_BOTH __host__ __device__
#else
#define ANNULUS_BOTH
#endif

namespace annulus::flash::decode {

/// The visible columns of one batch: row r sees column c iff low ≤ c − r ≤ high, r < rows and
/// c < columns. Its columns [begin, end) are the ones that all of its rows see.
struct BatchKeys {
  static constexpr std::int32_t kFar = 1 << 29;  ///< of a side of the band that hides nothing

  std::int32_t first_tile = 0;  ///< key tiles of a key/value head in all batches before
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t rows = 0;
  std::int32_t columns = 0;
  std::int32_t low = -kFar;
  std::int32_t high = kFar;

  /// Sets begin and end. Takes the last rows away if the band leaves them no column, as they would
  /// keep the others from sharing any.
  ANNULUS_BOTH constexpr void share() {
    const std::int32_t seeing = columns == 0 || columns - low < 0 ? 0 : columns - low;
    if (rows > seeing) rows = seeing;
    begin = rows - 1 + low > 0 ? rows - 1 + low : 0;
    end = high + 1 < columns ? high + 1 : columns;
    if (rows == 0 || end < begin) end = begin;
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int32_t tiles(std::int32_t tile_columns) const {
    return (end - begin + tile_columns - 1) / tile_columns;
  }
};

/// How thread blocks share the keys. The key tiles of all pairs of a batch and a key/value head
/// form one list, pair after pair, and each thread block takes the same number of them, give or
/// take one. What a thread block takes of a pair is a part; the parts are numbered from 0.
struct KeySplit {
  std::int64_t batches = 0;
  std::int64_t kv_heads = 0;
  std::int64_t tiles = 0;   ///< of all pairs
  std::int64_t blocks = 0;  ///< at most tiles; see of_call()
  /// The keys of each batch, and one more entry behind the last; null: all pairs have as many
  /// tiles.
  const BatchKeys* keys = nullptr;

  /// The split of a call whose lengths the device has: for as many tiles as there are now, and for
  /// `blocks` or fewer.
  [[nodiscard]] ANNULUS_BOTH constexpr KeySplit of_call() const {
    KeySplit split = *this;
    if (keys == nullptr) return split;
    split.tiles = keys[batches].first_tile * kv_heads;
    if (split.blocks > split.tiles) split.blocks = split.tiles;
    return split;
  }

  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t pairs() const { return batches * kv_heads; }
  /// The range of numbers of parts. If a pair and a block end together, one number is not used.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t parts() const { return blocks + pairs() - 1; }

  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t tiles_of(std::int64_t batch) const {
    if (keys == nullptr) return tiles / pairs();
    return keys[batch + 1].first_tile - keys[batch].first_tile;
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t first_tile_of_pair(std::int64_t pair) const {
    if (keys == nullptr) return pair * (tiles / pairs());
    const std::int64_t batch = pair / kv_heads;
    return keys[batch].first_tile * kv_heads + (pair - batch * kv_heads) * tiles_of(batch);
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t pair_of(std::int64_t tile) const {
    if (keys == nullptr) return tile / (tiles / pairs());
    std::int64_t batch = 0;
    for (std::int64_t behind = batches; behind - batch > 1;) {
      const std::int64_t middle = batch + (behind - batch) / 2;
      if (keys[middle].first_tile * kv_heads <= tile) {
        batch = middle;
      } else {
        behind = middle;
      }
    }
    return batch * kv_heads + (tile - keys[batch].first_tile * kv_heads) / tiles_of(batch);
  }
  /// The next pair that has tiles; there must be one.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t next(std::int64_t pair) const {
    do {
      ++pair;
    } while (tiles_of(pair / kv_heads) == 0);
    return pair;
  }

  /// Block b takes the tiles from first_tile(b) to before first_tile(b + 1).
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t first_tile(std::int64_t block) const {
    return block * tiles / blocks;
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t block_of(std::int64_t tile) const {
    return ((tile + 1) * blocks - 1) / tiles;
  }
  /// The blocks that share a pair, which has tiles.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t first_block(std::int64_t pair) const {
    return block_of(first_tile_of_pair(pair));
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t last_block(std::int64_t pair) const {
    return block_of(first_tile_of_pair(pair) + tiles_of(pair / kv_heads) - 1);
  }
  /// From one part to the next, the pair, the block or both advance, so no two have the same sum.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t part(std::int64_t pair,
                                                         std::int64_t block) const {
    return pair + block;
  }
};

}  // namespace annulus::flash::decode

#undef ANNULUS_BOTH
