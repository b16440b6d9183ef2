#include "flash/backward/score_gradients.hpp"

#include <algorithm>

#include <annulus/core/division.hpp>

#include "flash/backward/kernels.hpp"

namespace annulus::flash::backward {
namespace {

constexpr std::int64_t kTileBytes = std::int64_t{kWideTileKeys} * kWideTileKeys * 2;
// A part should have so many blocks of keys that multiprocessors finish at about the same time, and
// so many query tiles that what a block does once does not matter.
constexpr std::int64_t kKeyBlocks = 1024;
constexpr std::int64_t kQueryTiles = 32;

// At most `most`, and such that the last part is about as large as the others.
std::int64_t even_part(std::int64_t all, std::int64_t most) {
  return ceil_divide(all, ceil_divide(all, std::clamp<std::int64_t>(most, 1, all)));
}

std::int64_t pairs_of(const Arguments& a) {
  return std::int64_t{a.batches} * (a.heads / a.heads_per_kv_head);
}

}  // namespace

ScoreGradients divide_into_parts(const Arguments& a, std::int64_t key_tiles, bool query_wanted) {
  const std::int64_t group = a.heads_per_kv_head, tiles = a.padded_rows / kWideTileKeys;
  std::int64_t pairs = pairs_of(a), heads = group, query_tiles = tiles;
  if (query_wanted) {
    // Query tiles for which there is memory.
    const std::int64_t room = std::max(score_gradient_bytes / kTileBytes / key_tiles, kQueryTiles);
    const std::int64_t key_blocks = ceil_divide(a.columns, 2 * kWideTileKeys);
    pairs = std::min(pairs, std::max(room / (group * tiles), ceil_divide(kKeyBlocks, key_blocks)));
    while (pairs > 1 && room / (pairs * group) < std::min(tiles, kQueryTiles)) {
      pairs = ceil_divide(pairs, 2);
    }
    pairs = even_part(pairs_of(a), pairs);
    heads = even_part(group, room / kWideQueryTiles);
    const std::int64_t blocks = std::max<std::int64_t>(room / (pairs * heads) / kWideQueryTiles, 1);
    query_tiles = even_part(tiles, blocks * kWideQueryTiles);
    if (query_tiles < tiles) query_tiles = round_up(query_tiles, kWideQueryTiles);
  }
  return {nullptr, static_cast<std::int32_t>(pairs), static_cast<std::int32_t>(heads),
          static_cast<std::int32_t>(query_tiles), static_cast<std::int32_t>(key_tiles)};
}

std::int64_t bytes_for(const Arguments& a, const ScoreGradients& parts) {
  const std::int64_t bytes =
      std::int64_t{parts.pairs} * parts.heads * parts.query_tiles * parts.key_tiles * kTileBytes;
  const bool is_whole = parts.pairs == pairs_of(a) && parts.heads == a.heads_per_kv_head &&
                        parts.query_tiles == a.padded_rows / kWideTileKeys;
  // Blocks of a call whose sizes differ a little share one piece of memory.
  return is_whole ? bytes : std::max(bytes, score_gradient_bytes);
}

}  // namespace annulus::flash::backward
