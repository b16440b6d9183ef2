#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/walk.cuh"

// The key tiles that a few neighbouring query tiles see, by a straight band or by the lists of
// a TileMask.
namespace annulus::flash::backward {

/// A key tile, and how much of it each query tile sees.
template <int kQueryTiles>
struct KeyStep {
  std::int32_t tile;
  Seen seen[kQueryTiles];
};

/// Walks the key tiles that any of kQueryTiles query tiles of a head sees, in ascending order. The
/// query tiles begin with `first`. The key tiles lie from `first_key` to before `end_key`. Tiles
/// have kTile rows or columns.
template <int kTile, int kQueryTiles>
class KeyWalk {
 public:
  __device__ __forceinline__ KeyWalk(const Arguments& arguments, std::int32_t batch,
                                     std::int32_t head, std::int32_t first,
                                     std::int32_t first_key = 0,
                                     std::int32_t end_key = TileMask::kNowhere)
      : a(arguments), batch_(batch), head_(head), first_(first), tile_(first_key), end_(end_key) {
    if (a.mask.key_tiles > 0) {
      end_ = min(end_, a.mask.key_tiles);
      word_ = tile_ / 32 - 1;
      return;
    }
    rows_ = a.row_lengths == nullptr ? a.rows : a.row_lengths[batch];
    columns_ = a.column_lengths == nullptr ? a.columns : a.column_lengths[batch];
    const std::int32_t last_row = min((first + kQueryTiles) * kTile, rows_) - 1;
    tile_ = max(tile_, max(first * kTile + a.low, 0) / kTile);
    const std::int32_t last_column = min(last_row + a.high, columns_ - 1);
    end_ = last_row < first * kTile || last_column < 0 ? tile_ : min(end_, last_column / kTile + 1);
  }

  /// False if there is no further step.
  [[nodiscard]] __device__ __forceinline__ bool next(KeyStep<kQueryTiles>& step) {
    return a.mask.key_tiles > 0 ? next_listed(step) : next_in_band(step);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ bool next_in_band(KeyStep<kQueryTiles>& step) {
    if (tile_ >= end_) return false;
    step.tile = tile_++;
    const std::int32_t first_column = step.tile * kTile;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      const std::int32_t first_row = (first_ + i) * kTile;
      step.seen[i] = seen_in_band(a, first_row, min(first_row + kTile, rows_) - 1, first_column,
                                  first_column + kTile - 1, columns_);
    }
    return true;
  }

  [[nodiscard]] __device__ __forceinline__ bool next_listed(KeyStep<kQueryTiles>& step) {
    const TileMask& mask = a.mask;
    while (bits_ == 0) {
      if (++word_ * 32 >= end_) return false;
      const std::int64_t list = list_of(mask, batch_, head_);
      const std::uint32_t* const words =
          mask.key_bits + (list * mask.query_tiles + first_) * mask.key_words + word_;
#pragma unroll
      for (int i = 0; i < kQueryTiles; ++i) {
        if (first_ + i < mask.query_tiles) bits_ |= words[i * mask.key_words];
      }
      if (word_ * 32 < tile_) bits_ &= ~std::uint32_t{0} << tile_ % 32;
      if (word_ * 32 + 32 > end_) bits_ &= (std::uint32_t{1} << end_ % 32) - 1;
    }
    step.tile = word_ * 32 + __ffs(static_cast<int>(bits_)) - 1;
    bits_ &= bits_ - 1;
    const auto* const words =
        reinterpret_cast<const uint2*>(query_bits_of(a, batch_, head_, step.tile));
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
      const std::int32_t tile = first_ + i, bit = tile % 32;
      const uint2 queries = tile < mask.query_tiles ? words[tile / 32] : uint2{};
      step.seen[i] = (queries.x >> bit & 1) == 0   ? Seen::nothing
                     : (queries.y >> bit & 1) == 0 ? Seen::some
                                                   : Seen::all;
    }
    return true;
  }

  const Arguments& a;
  std::int32_t batch_, head_, first_;
  std::int32_t rows_ = 0, columns_ = 0;  // with a band
  std::int32_t tile_;                    // the next one; with lists, the first of all
  std::int32_t end_;                     // tiles end there
  std::int32_t word_ = 0;                // with lists, the index of the word in `bits_`
  std::uint32_t bits_ = 0;               // of tiles that are left
};

}  // namespace annulus::flash::backward
