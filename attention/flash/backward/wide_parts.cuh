#pragma once

#include <algorithm>
#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/kernels.hpp"
#include "flash/backward/walk.cuh"

// dS of wide heads in global memory: see ScoreGradients.
namespace annulus::flash::backward {

/// Bytes of a tile of dS.
inline constexpr int kScoreTileBytes = kWideTileKeys * kWideTileKeys * 2;

/// A part of a call's heads, queries and keys.
struct Part {
  std::int32_t first_pair, pairs;     ///< (batch, kv head) pairs
  std::int32_t first_head, end_head;  ///< query heads of each pair's group
  std::int32_t first_tile, end_tile;  ///< query tiles
  std::int32_t first_key, end_key;    ///< key tiles

  [[nodiscard]] static std::int32_t count(const Arguments& a) {
    return key_parts(a) * tile_parts(a) * head_parts(a) * divide(pairs_of(a), a.grad_scores.pairs);
  }

  Part(const Arguments& a, std::int32_t index) {
    const ScoreGradients& sizes = a.grad_scores;
    const auto next = [&](std::int32_t parts) {
      const std::int32_t at = index % parts;
      index /= parts;
      return at;
    };
    first_key = next(key_parts(a)) * sizes.key_tiles;
    end_key = std::min(first_key + sizes.key_tiles, key_tiles_of(a));
    first_tile = next(tile_parts(a)) * sizes.query_tiles;
    end_tile = std::min(first_tile + sizes.query_tiles, query_tiles_of(a));
    first_head = next(head_parts(a)) * sizes.heads;
    end_head = std::min(first_head + sizes.heads, a.heads_per_kv_head);
    first_pair = index * sizes.pairs;
    pairs = std::min(sizes.pairs, pairs_of(a) - first_pair);
  }

  /// False if the band hides all pairs of the part. Always true with lists.
  [[nodiscard]] bool may_see(const Arguments& a) const {
    return a.mask.key_tiles > 0 ||
           ((first_key - end_tile) * std::int64_t{kWideTileKeys} + 1 <= a.high &&
            (end_key - first_tile) * std::int64_t{kWideTileKeys} - 1 >= a.low);
  }

 private:
  [[nodiscard]] static std::int32_t divide(std::int32_t a, std::int32_t b) {
    return (a + b - 1) / b;
  }
  [[nodiscard]] static std::int32_t pairs_of(const Arguments& a) {
    return a.batches * (a.heads / a.heads_per_kv_head);
  }
  [[nodiscard]] static std::int32_t query_tiles_of(const Arguments& a) {
    return a.padded_rows / kWideTileKeys;
  }
  [[nodiscard]] static std::int32_t key_tiles_of(const Arguments& a) {
    return divide(a.columns, kWideTileKeys);
  }
  [[nodiscard]] static std::int32_t key_parts(const Arguments& a) {
    return divide(key_tiles_of(a), a.grad_scores.key_tiles);
  }
  [[nodiscard]] static std::int32_t tile_parts(const Arguments& a) {
    return divide(query_tiles_of(a), a.grad_scores.query_tiles);
  }
  [[nodiscard]] static std::int32_t head_parts(const Arguments& a) {
    return divide(a.heads_per_kv_head, a.grad_scores.heads);
  }
};

/// The index of a head's query tile 0 among the query tiles of ScoreGradients; query tile t has
/// index score_row() + t. It can be negative, since the part may begin at a later query tile.
/// `pair` is the (batch, kv head) pair of `head`.
[[nodiscard]] __device__ __forceinline__ std::int32_t score_row(const Arguments& a,
                                                                const Part& part, std::int32_t pair,
                                                                std::int32_t head) {
  const std::int32_t in_group = head % a.heads_per_kv_head - part.first_head;
  return ((pair - part.first_pair) * a.grad_scores.heads + in_group) * a.grad_scores.query_tiles -
         part.first_tile;
}

/// A tile of dS.
[[nodiscard]] __device__ __forceinline__ uint4* score_tile(const Arguments& a, std::int32_t index) {
  return static_cast<uint4*>(a.grad_scores.tiles) +
         std::int64_t{index} * (kScoreTileBytes / sizeof(uint4));
}

/// True if the tiles of a query tile follow each other in memory.
[[nodiscard]] __device__ __forceinline__ bool are_compact(const Arguments& a) {
  return a.grad_scores.key_tiles * kWideTileKeys >= a.columns;
}

/// The place of a key tile's dS among the tiles of a query tile, which sees the key tile.
[[nodiscard]] __device__ __forceinline__ std::int32_t score_place(
    const Arguments& a, const Part& part, std::int32_t batch, std::int32_t head,
    std::int32_t query_tile, std::int32_t key_tile) {
  const TileMask& mask = a.mask;
  if (!are_compact(a)) return key_tile - part.first_key;
  if (mask.key_tiles == 0) {
    return key_tile - max(query_tile * kWideTileKeys + a.low, 0) / kWideTileKeys;
  }
  const std::int64_t list = list_of(mask, batch, head);
  const std::int64_t word = (list * mask.query_tiles + query_tile) * mask.key_words + key_tile / 32;
  const std::uint32_t before = (std::uint32_t{1} << key_tile % 32) - 1;
  return mask.key_ranks[word] + __popc(mask.key_bits[word] & before);
}

/// The transpose of an 8 x 8 matrix, of which each lane of a warp has two elements of a row.
[[nodiscard]] __device__ __forceinline__ std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t result = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace annulus::flash::backward
