#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ANNULUS_BOTH __host__ __device__
#else
#define ANNULUS_BOTH
#endif

namespace annulus::flash::decode {

/// How thread blocks share the keys. The key tiles of all pairs of a batch and a key/value head
/// form one list, pair after pair, and each thread block takes the same number of them, give or
/// take one. What a thread block takes of a pair is a part; the parts are numbered from 0.
struct KeySplit {
  std::int64_t pairs = 0;
  std::int64_t tiles_of_pair = 0;  ///< positive
  std::int64_t blocks = 0;         ///< 1 … tiles()

  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t tiles() const { return pairs * tiles_of_pair; }
  /// Where a pair and a block end together, a number is left out.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t parts() const { return blocks + pairs - 1; }

  /// Block b takes the tiles from first_tile(b) to before first_tile(b + 1).
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t first_tile(std::int64_t block) const {
    return block * tiles() / blocks;
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t block_of(std::int64_t tile) const {
    return ((tile + 1) * blocks - 1) / tiles();
  }
  /// The blocks that share a pair.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t first_block(std::int64_t pair) const {
    return block_of(pair * tiles_of_pair);
  }
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t last_block(std::int64_t pair) const {
    return block_of((pair + 1) * tiles_of_pair - 1);
  }
  /// From one part to the next, the pair, the block or both advance, so no two have the same sum.
  [[nodiscard]] ANNULUS_BOTH constexpr std::int64_t part(std::int64_t pair,
                                                         std::int64_t block) const {
    return pair + block;
  }
};

}  // namespace annulus::flash::decode

#undef ANNULUS_BOTH
