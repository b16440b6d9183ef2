#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <annulus/core/position.hpp>

namespace annulus {

/// Rows of a tile where bits must not depend on how many rows a rank has: tiles end where a
/// position is a multiple of it, or of a power of two below it. Shorter tiles spend too much on
/// loading keys and values.
inline constexpr std::int64_t kLeastRows = 128;

/// Query rows of one batch that lie in one range.
struct RowTile {
  std::int64_t batch = 0;  ///< local
  LocalPosition begin;     ///< local position of rows.start
  PositionRange rows;
};

/// Query heads that read the same key/value head; local.
struct HeadTile {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t kv_head = 0;
};

/// The query heads of a block, in tiles of up to `most` heads.
inline std::vector<HeadTile> head_tiles(std::int64_t heads, std::int64_t kv_heads,
                                        std::int64_t most) {
  const std::int64_t per_kv_head = heads / kv_heads;
  std::vector<HeadTile> tiles;
  for (std::int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
    for (std::int64_t begin = 0; begin < per_kv_head; begin += most) {
      tiles.push_back(
          {kv_head * per_kv_head + begin, std::min(most, per_kv_head - begin), kv_head});
    }
  }
  return tiles;
}

}  // namespace annulus
