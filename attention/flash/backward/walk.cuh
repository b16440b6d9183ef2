#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/shared.cuh"

// The query tiles that a key tile meets, their order, and their visible pairs. A straight band or
// the lists of a TileMask decide.
//
// If key tiles take turns (see Turn), a block walks from the last query tile to the first. Blocks
// that run at the same time then keep one pace, each behind its predecessor. Otherwise, a block
// walks from the first query tile to the last. In both cases it finishes all query tiles of a head
// before the next head; or, with Arguments::heads_inside, all heads of a query tile before the next
// query tile.
namespace annulus::flash::backward {

/// True if a column has no position, or lies `distance` positions after the first column.
[[nodiscard]] __device__ __forceinline__ bool is_neighbour(std::int32_t position,
                                                           std::int32_t first,
                                                           std::int32_t distance) {
  return position == TileMask::kNowhere || position == first + distance;
}

enum class Seen : std::int32_t { nothing, some, all };

/// True if the band shows all of a tile's pairs, and no column lies at `columns` or later. Last
/// rows and columns are inclusive.
[[nodiscard]] __device__ __forceinline__ bool all_in_band(
    const Arguments& a, std::int32_t first_row, std::int32_t last_row, std::int32_t first_column,
    std::int32_t last_column, std::int32_t columns) {
  return last_column - first_row <= a.high && first_column - last_row >= a.low &&
         last_column < columns;
}

/// How much of a tile's pairs the band shows, where columns from `columns` on are hidden.
[[nodiscard]] __device__ __forceinline__ Seen
seen_in_band(const Arguments& a, std::int32_t first_row, std::int32_t last_row,
             std::int32_t first_column, std::int32_t last_column, std::int32_t columns) {
  if (last_row < first_row || first_column >= columns || first_column - last_row > a.high ||
      min(last_column, columns - 1) - first_row < a.low) {
    return Seen::nothing;
  }
  return all_in_band(a, first_row, last_row, first_column, last_column, columns) ? Seen::all
                                                                                 : Seen::some;
}

/// A query tile of one head.
struct Step {
  std::int32_t tile, head;
  std::int32_t masked;  ///< some pair is hidden
};

/// The progress of ListWalk. It lies in shared memory, since the thread that walks has few
/// registers.
struct ListPlace {
  const uint2* words;      ///< of the first head: bits of visible and of full query tiles
  std::int64_t head_step;  ///< from a head's words to the next head's
  std::int32_t word, head;
  std::uint32_t bits;  ///< query tiles of the word that are left
};

/// The steps of a block under a band.
template <class Work>
class BandWalk {
 public:
  __device__ __forceinline__ BandWalk(const Arguments& arguments, const Work& of, ListPlace&)
      : a(arguments),
        work(of),
        tile_(a.turns != nullptr ? of.last_tile : of.first_tile),
        head_(0) {}

  /// False if there is no further step.
  [[nodiscard]] __device__ __forceinline__ bool next(Step& step) {
    if (a.heads_inside ? tile_ < work.first_tile : head_ == a.heads_per_kv_head) return false;
    step = {tile_, work.kv_head * a.heads_per_kv_head + head_, work.is_masked(a, tile_) ? 1 : 0};
    if (a.heads_inside) {
      if (++head_ == a.heads_per_kv_head) {
        head_ = 0;
        --tile_;
      }
    } else if (a.turns != nullptr) {
      if (--tile_ < work.first_tile) {
        tile_ = work.last_tile;
        ++head_;
      }
    } else if (++tile_ > work.last_tile) {
      tile_ = work.first_tile;
      ++head_;
    }
    return true;
  }

 private:
  const Arguments& a;
  const Work& work;
  std::int32_t tile_, head_;
};

/// The index of the lists of a batch and query head.
[[nodiscard]] __device__ __forceinline__ std::int64_t list_of(const TileMask& mask,
                                                              std::int32_t batch,
                                                              std::int32_t head) {
  return (mask.batches > 1 ? batch : 0) * mask.heads + (mask.heads > 1 ? head : 0);
}

/// The words of a key tile in TileMask::query_bits, for a query head.
[[nodiscard]] __device__ __forceinline__ const std::uint32_t* query_bits_of(const Arguments& a,
                                                                            std::int32_t batch,
                                                                            std::int32_t head,
                                                                            std::int32_t key_tile) {
  const TileMask& mask = a.mask;
  const std::int64_t list = list_of(mask, batch, head);
  return mask.query_bits + (list * mask.key_tiles + key_tile) * mask.query_words * 2;
}

/// The steps of a block by lists.
template <class Work>
class ListWalk {
 public:
  /// Threads that do not walk leave the place alone.
  __device__ __forceinline__ ListWalk(const Arguments& arguments, const Work& of, ListPlace& place,
                                      bool walks = true)
      : a(arguments), work(of), at(place) {
    if (!walks) return;
    at = {reinterpret_cast<const uint2*>(
              query_bits_of(a, work.batch, work.kv_head * a.heads_per_kv_head, work.key_tile())),
          a.mask.heads > 1 ? std::int64_t{a.mask.key_tiles} * a.mask.query_words : 0,
          a.turns != nullptr ? a.mask.query_words : -1, 0, 0};
  }

  [[nodiscard]] __device__ __forceinline__ bool next(Step& step) {
    return a.turns != nullptr ? next_in_turns(step) : next_of_head(step);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ uint2 bits_of(std::int32_t head,
                                                         std::int32_t word) const {
    return at.words[head * at.head_step + word];
  }
  __device__ __forceinline__ void set(Step& step, std::int32_t bit, std::uint32_t full) const {
    step = {at.word * 32 + bit, work.kv_head * a.heads_per_kv_head + at.head,
            (full >> bit & 1) != 0 ? 0 : 1};
  }

  [[nodiscard]] __device__ __forceinline__ bool next_of_head(Step& step) {
    while (at.bits == 0) {
      if (++at.word == a.mask.query_words) {
        at.word = 0;
        ++at.head;
      }
      if (at.head == a.heads_per_kv_head) return false;
      at.bits = bits_of(at.head, at.word).x;
    }
    set(step, __ffs(static_cast<int>(at.bits)) - 1, bits_of(at.head, at.word).y);
    at.bits &= at.bits - 1;
    return true;
  }

  // `at.bits`: tiles of the word that some head sees and that are left.
  [[nodiscard]] __device__ __forceinline__ bool next_in_turns(Step& step) {
    while (true) {
      while (at.bits == 0) {
        if (--at.word < 0) return false;
        const std::int32_t lists = a.mask.heads > 1 ? a.heads_per_kv_head : 1;
        for (std::int32_t head = 0; head < lists; ++head) at.bits |= bits_of(head, at.word).x;
      }
      const std::int32_t bit = 31 - __clz(static_cast<int>(at.bits));
      const uint2 bits = bits_of(at.head, at.word);
      const bool seen = (bits.x >> bit & 1) != 0;
      if (seen) set(step, bit, bits.y);
      if (++at.head == a.heads_per_kv_head) {
        at.head = 0;
        at.bits &= ~(std::uint32_t{1} << bit);
      }
      if (seen) return true;
    }
  }

  const Arguments& a;
  const Work& work;
  ListPlace& at;
};

/// A thread's share of the number of steps.
template <class Work>
[[nodiscard]] __device__ __forceinline__ std::int32_t steps_of_thread(const Arguments& a,
                                                                      const Work& work) {
  std::int32_t steps = 0;
  for (std::int32_t head = 0; head < a.heads_per_kv_head; ++head) {
    const std::uint32_t* const bits =
        query_bits_of(a, work.batch, work.kv_head * a.heads_per_kv_head + head, work.key_tile());
    for (auto word = static_cast<std::int32_t>(threadIdx.x); word < a.mask.query_words;
         word += static_cast<std::int32_t>(blockDim.x)) {
      steps += __popc(bits[2 * word]);
    }
  }
  return steps;
}

/// 1 + the last key tile before `key_tile` that adds to the step's query tile; 0 if there is none.
[[nodiscard]] __device__ __forceinline__ std::int32_t listed_before(const Arguments& a,
                                                                    std::int32_t batch,
                                                                    const Step& step,
                                                                    std::int32_t key_tile) {
  const TileMask& mask = a.mask;
  const std::int64_t list = list_of(mask, batch, step.head);
  const std::uint32_t* const words =
      mask.key_bits + (list * mask.query_tiles + step.tile) * mask.key_words;
  std::int32_t word = key_tile / 32;
  std::uint32_t bits = words[word] & ((std::uint32_t{1} << key_tile % 32) - 1);
  while (bits == 0 && word > 0) bits = words[--word];
  return bits == 0 ? 0 : word * 32 + 32 - __clz(static_cast<int>(bits));
}

/// A column's position and segment id, which decide whether a row sees it.
struct ListedColumn {
  std::int32_t position, id;
};

[[nodiscard]] __device__ __forceinline__ ListedColumn listed_column(const Arguments& a,
                                                                    std::int32_t batch,
                                                                    std::int32_t tile_columns,
                                                                    std::int32_t column) {
  const TileMask& mask = a.mask;
  const std::int64_t of_batch =
      mask.batches > 1 ? std::int64_t{batch} * mask.key_tiles * tile_columns : 0;
  return {mask.column_positions[column],
          mask.column_ids != nullptr ? mask.column_ids[of_batch + column] : 0};
}

/// The visible keys of a row of a masked tile.
class ListedRow {
 public:
  ListedRow() = default;
  __device__ __forceinline__ ListedRow(const Arguments& a, std::int32_t batch,
                                       std::int32_t tile_rows, std::int32_t row) {
    const TileMask& mask = a.mask;
    const std::int64_t at =
        (mask.batches > 1 ? std::int64_t{batch} * mask.query_tiles * tile_rows : 0) + row;
    keys_ = *reinterpret_cast<const int4*>(mask.row_keys + at);
    if (mask.row_ids != nullptr) id_ = mask.row_ids[at];
    if (mask.row_blocks != nullptr) block_ = mask.row_blocks[min(row, a.rows - 1)];
  }

  /// `head`: the row's query head.
  [[nodiscard]] __device__ __forceinline__ bool sees(const Arguments& a, std::int32_t batch,
                                                     std::int32_t head,
                                                     const ListedColumn& column) const {
    const std::int32_t key = column.position;
    const bool in_range = (key >= keys_.x && key < keys_.y) || (key >= keys_.z && key < keys_.w);
    return in_range && admits(a, batch, head, column);
  }

  /// Bit k: the row sees column k. The 16 columns have neighbouring positions, one id and one
  /// block; `first` is column 0.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sees_16(const Arguments& a,
                                                                 std::int32_t batch,
                                                                 std::int32_t head,
                                                                 const ListedColumn& first) const {
    const std::uint32_t seen =
        bits_of(keys_.x, keys_.y, first.position) | bits_of(keys_.z, keys_.w, first.position);
    return seen != 0 && admits(a, batch, head, first) ? seen : 0;
  }

 private:
  // Bit k: position first + k lies in [begin, end).
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t bits_of(std::int32_t begin,
                                                                        std::int32_t end,
                                                                        std::int32_t first) {
    begin = min(max(begin, first), first + 16) - first;
    end = min(max(end, first), first + 16) - first;
    return ((std::uint32_t{1} << end) - 1) & (~std::uint32_t{0} << begin);
  }
  // True if id and block let the row see a column in its range.
  [[nodiscard]] __device__ __forceinline__ bool admits(const Arguments& a, std::int32_t batch,
                                                       std::int32_t head,
                                                       const ListedColumn& column) const {
    const TileMask& mask = a.mask;
    if (mask.row_ids != nullptr && id_ != column.id) return false;
    if (mask.row_blocks == nullptr) return true;
    const std::int32_t block = column.position / mask.key_block;
    const std::int64_t row =
        mask.first_block_row + batch * mask.batch_rows + head * mask.head_rows + block_;
    return (mask.blocks[row * mask.words_per_row + block / 64] >> block % 64 & 1) != 0;
  }

  int4 keys_ = {};
  std::int32_t id_ = 0, block_ = 0;
};

}  // namespace annulus::flash::backward
