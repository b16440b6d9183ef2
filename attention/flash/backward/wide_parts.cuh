#pragma once

#include <cstdint>

#include "flash/backward/arguments.hpp"
#include "flash/backward/kernels.hpp"
#include "flash/backward/walk.cuh"

// dS of wide heads in global memory: see ScoreGradients.
namespace annulus::flash::backward {

/// Bytes of a tile of dS.
inline constexpr int kScoreTileBytes = kWideTileKeys * kWideTileKeys * 2;

/// A part of a call's heads and queries.
struct Part {
  std::int32_t first_pair, pairs;     ///< (batch, kv head) pairs
  std::int32_t first_head, end_head;  ///< query heads of each pair's group
  std::int32_t first_tile, end_tile;  ///< query tiles

  [[nodiscard]] static __host__ __device__ std::int32_t all_tiles(const Arguments& a) {
    return a.padded_rows / kWideTileKeys;
  }
  [[nodiscard]] static __host__ __device__ std::int32_t all_pairs(const Arguments& a) {
    return a.batches * (a.heads / a.heads_per_kv_head);
  }
  [[nodiscard]] static __host__ __device__ std::int32_t count(const Arguments& a) {
    return tile_parts(a) * head_parts(a) * divide(all_pairs(a), a.grad_scores.pairs);
  }

  __host__ __device__ Part(const Arguments& a, std::int32_t index) {
    const ScoreGradients& sizes = a.grad_scores;
    const std::int32_t of_heads = index / tile_parts(a), of_pairs = of_heads / head_parts(a);
    first_tile = (index - of_heads * tile_parts(a)) * sizes.query_tiles;
    end_tile = smaller(first_tile + sizes.query_tiles, all_tiles(a));
    first_head = (of_heads - of_pairs * head_parts(a)) * sizes.heads;
    end_head = smaller(first_head + sizes.heads, a.heads_per_kv_head);
    first_pair = of_pairs * sizes.pairs;
    pairs = smaller(first_pair + sizes.pairs, all_pairs(a)) - first_pair;
  }

 private:
  [[nodiscard]] static __host__ __device__ std::int32_t divide(std::int32_t a, std::int32_t b) {
    return (a + b - 1) / b;
  }
  [[nodiscard]] static __host__ __device__ std::int32_t smaller(std::int32_t a, std::int32_t b) {
    return a < b ? a : b;
  }
  [[nodiscard]] static __host__ __device__ std::int32_t tile_parts(const Arguments& a) {
    return divide(all_tiles(a), a.grad_scores.query_tiles);
  }
  [[nodiscard]] static __host__ __device__ std::int32_t head_parts(const Arguments& a) {
    return divide(a.heads_per_kv_head, a.grad_scores.heads);
  }
};

/// The number of query tiles whose dS lies before that of query tile 0 of a query head, of which
/// the part may have later ones. `pair` has the head.
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

/// The number of key tiles before this one that a query tile sees. It sees this one.
[[nodiscard]] __device__ __forceinline__ std::int32_t key_rank(const Arguments& a,
                                                               std::int32_t batch,
                                                               std::int32_t head,
                                                               std::int32_t query_tile,
                                                               std::int32_t key_tile) {
  const TileMask& mask = a.mask;
  if (mask.key_tiles == 0) {
    return key_tile - max(query_tile * kWideTileKeys + a.low, 0) / kWideTileKeys;
  }
  const std::int64_t list =
      (mask.batches > 1 ? batch : 0) * mask.heads + (mask.heads > 1 ? head : 0);
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
