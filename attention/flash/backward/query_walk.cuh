#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/key_walk.cuh"
#include "flash/backward/walk.cuh"
#include "flash/backward/wide_parts.cuh"

// The query tiles that see one or two neighbouring key tiles, by a straight band or by the lists of
// a TileMask.
namespace annulus::flash::backward {

/// A query tile of one head, and how much it sees of each key tile.
template <int kKeyTiles>
struct QueryStep {
  std::int32_t tile, head;
  Seen seen[kKeyTiles];

  /// True if some pair is hidden.
  [[nodiscard]] __device__ __forceinline__ bool is_masked() const {
    return seen[0] == Seen::some || seen[kKeyTiles - 1] == Seen::some;
  }
};

/// Walks the query tiles of a part, head by head, in ascending order. Tiles have kTile rows or
/// columns. The walk lies in shared memory, since the thread that walks has few registers.
template <int kTile, int kKeyTiles>
class QueryWalk {
 public:
  template <class Work>
  __device__ __forceinline__ void begin(const Arguments& a, const Work& work, const Part& part) {
    at_ = a.mask.key_tiles > 0 ? part.first_tile / 32 - 1 : work.first_tile;
    head_ = part.first_head;
    bits_ = 0;
    if (a.mask.key_tiles == 0) return;
    words_ = reinterpret_cast<const uint2*>(query_bits_of(
        a, work.batch, work.kv_head * a.heads_per_kv_head, work.first_column / kTile));
    head_step_ = a.mask.heads > 1 ? std::int64_t{a.mask.key_tiles} * a.mask.query_words : 0;
  }

  /// False if there is no further step.
  template <class Work>
  [[nodiscard]] __device__ __forceinline__ bool next(const Arguments& a, const Work& work,
                                                     const Part& part, QueryStep<kKeyTiles>& step) {
    return a.mask.key_tiles > 0 ? next_listed(a, work, part, step)
                                : next_in_band(a, work, part, step);
  }

 private:
  template <class Work>
  [[nodiscard]] __device__ __forceinline__ bool next_in_band(const Arguments& a, const Work& work,
                                                             const Part& part,
                                                             QueryStep<kKeyTiles>& step) {
    if (at_ > work.last_tile) {
      at_ = work.first_tile;
      ++head_;
    }
    if (head_ == part.end_head) return false;
    const std::int32_t first_row = at_ * kTile;
    step.tile = at_++;
    step.head = work.kv_head * a.heads_per_kv_head + head_;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const std::int32_t first = work.first_column + i * kTile;
      step.seen[i] = seen_in_band(a, first_row, first_row + kTile - 1, first, first + kTile - 1,
                                  work.columns);
    }
    return true;
  }

  // Bits of query tiles that see some, and all, of a key tile.
  template <class Work>
  [[nodiscard]] __device__ __forceinline__ uint2 word_of(const Arguments& a, const Work& work,
                                                         int key_tile) const {
    if (work.first_column / kTile + key_tile >= a.mask.key_tiles) return {0, 0};
    return words_[head_ * head_step_ + key_tile * a.mask.query_words + at_];
  }

  template <class Work>
  [[nodiscard]] __device__ __forceinline__ bool next_listed(const Arguments& a, const Work& work,
                                                            const Part& part,
                                                            QueryStep<kKeyTiles>& step) {
    while (bits_ == 0) {
      if (++at_ * 32 >= part.end_tile) {
        at_ = part.first_tile / 32;
        ++head_;
      }
      if (head_ == part.end_head) return false;
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) bits_ |= word_of(a, work, i).x;
      // Query tiles outside the part do not count.
      if (at_ * 32 < part.first_tile) bits_ &= ~std::uint32_t{0} << part.first_tile % 32;
      if (at_ * 32 + 32 > part.end_tile) bits_ &= (std::uint32_t{1} << part.end_tile % 32) - 1;
    }
    const int bit = __ffs(static_cast<int>(bits_)) - 1;
    bits_ &= bits_ - 1;
    step.tile = at_ * 32 + bit;
    step.head = work.kv_head * a.heads_per_kv_head + head_;
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const uint2 word = word_of(a, work, i);
      step.seen[i] = (word.x >> bit & 1) == 0   ? Seen::nothing
                     : (word.y >> bit & 1) == 0 ? Seen::some
                                                : Seen::all;
    }
    return true;
  }

  std::int32_t at_, head_;  // the next tile; with lists, the word of `bits_`
  std::uint32_t bits_;      // of tiles that are left
  const uint2* words_;      // with lists, those of the first key tile in the group's first head
  std::int64_t head_step_;  // from a head's words to those of the next head
};

}  // namespace annulus::flash::backward
