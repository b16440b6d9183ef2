#include "flash/backward/score_gradients.hpp"

#include <algorithm>

#include <annulus/core/division.hpp>

#include "flash/backward/kernels.hpp"

namespace annulus::flash::backward {
namespace {

constexpr std::int64_t kTileBytes = std::int64_t{kWideTileKeys} * kWideTileKeys * 2;
// The most key tiles of a part that does not have all of them.
constexpr std::int64_t kPartKeyTiles = 256;
// Key blocks that a part should have, so that multiprocessors finish at about the same time. A part
// with all queries may have fewer: otherwise it would be split by queries, and a key tile would
// need a block in each of those parts.
constexpr std::int64_t kManyBlocks = 1024, kEnoughBlocks = 512;
// Query tiles that a key tile should meet in a part, so that a block's fixed costs matter little.
constexpr std::int64_t kSteps = 64;

// The size of parts that divide `all` about evenly, at most `most`. The last one may be smaller.
std::int64_t even_part(std::int64_t all, std::int64_t most) {
  return ceil_divide(all, ceil_divide(all, std::clamp<std::int64_t>(most, 1, all)));
}

}  // namespace

ScoreGradients divide_into_parts(const Arguments& a, std::int64_t seen_tiles,
                                 std::int64_t most_bytes) {
  const std::int64_t all_pairs = std::int64_t{a.batches} * (a.heads / a.heads_per_kv_head);
  const std::int64_t group = a.heads_per_kv_head, all_tiles = a.padded_rows / kWideTileKeys;
  const std::int64_t all_keys = ceil_divide(a.columns, kWideTileKeys);
  const std::int64_t most_tiles = most_bytes / kTileBytes;
  std::int64_t pairs = all_pairs, heads = group, tiles = all_tiles;
  std::int64_t keys = all_keys, places = std::max<std::int64_t>(seen_tiles, 1);
  if (pairs * heads * tiles * places > most_tiles) {
    const std::int64_t most_keys = std::min(kPartKeyTiles, most_tiles / kWideQueryTiles);
    // Under lists, even parts without a visible pair are launched. So parts of a sparse mask keep
    // all keys if kSteps query tiles then fit.
    const bool is_sparse = 4 * places <= all_keys && places * kSteps <= most_tiles;
    if (places > most_keys && !is_sparse) {
      // An even number, since a block may have two key tiles.
      places = keys = round_up(even_part(all_keys, most_keys / 2 * 2), 2);
    }
    const std::int64_t room = most_tiles / places, blocks = ceil_divide(keys, 2);
    pairs = room / (group * all_tiles);
    if (pairs * blocks < kEnoughBlocks) {
      pairs = std::min(std::max(pairs, ceil_divide(kManyBlocks, blocks)), room / kSteps);
    }
    pairs = even_part(all_pairs, pairs);
    if (pairs * group * all_tiles > room) {
      heads = even_part(group, room / pairs / kWideQueryTiles);
      tiles = room / (pairs * heads) / kWideQueryTiles * kWideQueryTiles;
      tiles = even_part(all_tiles, std::max<std::int64_t>(tiles, kWideQueryTiles));
      if (tiles < all_tiles) tiles = round_up(tiles, kWideQueryTiles);
    }
  }
  ScoreGradients parts;
  parts.pairs = static_cast<std::int32_t>(pairs);
  parts.heads = static_cast<std::int32_t>(heads);
  parts.query_tiles = static_cast<std::int32_t>(tiles);
  parts.key_tiles = static_cast<std::int32_t>(keys);
  parts.places = static_cast<std::int32_t>(places);
  return parts;
}

std::int64_t bytes_of(const ScoreGradients& parts) {
  return std::int64_t{parts.pairs} * parts.heads * parts.query_tiles * parts.places * kTileBytes;
}

}  // namespace annulus::flash::backward
