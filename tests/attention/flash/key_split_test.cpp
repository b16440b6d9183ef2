// How thread blocks share key tiles: every tile once, in even shares, in parts with names of their
// own.
#include "flash/decode/key_split.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/mask.hpp>

#include "flash/decode/batch_keys.hpp"

namespace annulus::test {
namespace {

using flash::decode::BatchKeys;
using flash::decode::KeySplit;
using flash::decode::masked_keys;
using flash::decode::MaskedKeys;

KeySplit even_split(std::int64_t pairs, std::int64_t tiles_of_pair, std::int64_t blocks) {
  return {.batches = pairs, .kv_heads = 1, .tiles = pairs * tiles_of_pair, .blocks = blocks};
}

TEST(KeySplit, CoversEveryTileOnceInEvenShares) {
  for (const std::int64_t pairs : {1, 2, 3, 8, 31, 128, 133, 1000}) {
    for (const std::int64_t tiles_of_pair : {1, 2, 7, 64, 1023}) {
      for (const std::int64_t blocks : {1, 2, 3, 16, 131, 132}) {
        const KeySplit split = even_split(pairs, tiles_of_pair, blocks);
        if (blocks > split.tiles) continue;
        const std::int64_t least = split.tiles / blocks;
        EXPECT_EQ(split.first_tile(0), 0);
        EXPECT_EQ(split.first_tile(blocks), split.tiles);
        for (std::int64_t block = 0; block < blocks; ++block) {
          const std::int64_t first = split.first_tile(block);
          const std::int64_t end = split.first_tile(block + 1);
          EXPECT_GE(end - first, least);
          EXPECT_LE(end - first, least + 1);
          EXPECT_EQ(split.block_of(first), block);
          EXPECT_EQ(split.block_of(end - 1), block);
        }
      }
    }
  }
}

TEST(KeySplit, NumbersPartsWithoutRepeating) {
  for (const std::int64_t pairs : {1, 3, 8, 64, 200}) {
    for (const std::int64_t tiles_of_pair : {1, 2, 33}) {
      for (const std::int64_t blocks : {1, 5, 64, 132}) {
        const KeySplit split = even_split(pairs, tiles_of_pair, blocks);
        if (blocks > split.tiles) continue;
        std::set<std::pair<std::int64_t, std::int64_t>> met;  // pair and block
        for (std::int64_t tile = 0; tile < split.tiles; ++tile) {
          met.emplace(tile / tiles_of_pair, split.block_of(tile));
        }
        std::set<std::int64_t> parts;
        for (const auto& [pair, block] : met) {
          EXPECT_GE(block, split.first_block(pair));
          EXPECT_LE(block, split.last_block(pair));
          const std::int64_t part = split.part(pair, block);
          EXPECT_TRUE(parts.insert(part).second) << part;
          EXPECT_LT(part, split.parts());
        }
        std::int64_t shares = 0;
        for (std::int64_t pair = 0; pair < pairs; ++pair) {
          shares += split.last_block(pair) - split.first_block(pair) + 1;
        }
        EXPECT_EQ(shares, static_cast<std::int64_t>(met.size()));
      }
    }
  }
}

// A million keys of 64 batches with 8 heads: the products stay far below 2^63.
TEST(KeySplit, LargeProblems) {
  const KeySplit split = even_split(512, 1 << 20, 132);
  EXPECT_EQ(split.first_tile(132), split.tiles);
  EXPECT_EQ(split.block_of(split.tiles - 1), 131);
}

// Batches with any number of tiles, none too: the same, and every tile is found in its pair.
TEST(KeySplit, BatchesOfTheirOwnLengths) {
  const std::vector<std::vector<std::int32_t>> cases{
      {5}, {0, 3}, {3, 0}, {0, 0, 7, 0, 1, 0}, {1, 100, 2, 0, 0, 50, 1}, {9, 9, 9, 9}};
  for (const std::vector<std::int32_t>& tiles : cases) {
    std::vector<BatchKeys> keys(tiles.size() + 1);
    for (std::size_t b = 0; b < tiles.size(); ++b) {
      keys[b + 1].first_tile = keys[b].first_tile + tiles[b];
    }
    for (const std::int64_t kv_heads : {1, 2, 8}) {
      for (const std::int64_t blocks : {1, 2, 7, 31, 132}) {
        const std::int64_t all = keys.back().first_tile * kv_heads;
        if (blocks > all) continue;
        const KeySplit split{static_cast<std::int64_t>(tiles.size()), kv_heads, all, blocks,
                             keys.data()};
        std::set<std::int64_t> parts;
        std::int64_t tile = 0;
        std::int64_t last = -1;
        for (std::int64_t pair = 0; pair < split.pairs(); ++pair) {
          const std::int64_t count = tiles[static_cast<std::size_t>(pair / kv_heads)];
          ASSERT_EQ(split.tiles_of(pair / kv_heads), count);
          if (count == 0) continue;
          if (last >= 0) {
            EXPECT_EQ(split.next(last), pair);
          }
          last = pair;
          ASSERT_EQ(split.first_tile_of_pair(pair), tile);
          for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(split.pair_of(tile + i), pair);
          EXPECT_EQ(split.block_of(tile), split.first_block(pair));
          tile += count;
          EXPECT_EQ(split.block_of(tile - 1), split.last_block(pair));
          for (std::int64_t b = split.first_block(pair); b <= split.last_block(pair); ++b) {
            EXPECT_TRUE(parts.insert(split.part(pair, b)).second);
            EXPECT_LT(split.part(pair, b), split.parts());
          }
        }
        EXPECT_EQ(tile, all);
      }
    }
  }
}

// Beside the columns that all rows see, a row has fewer than there are rows.
TEST(MaskedKeys, AreWhatAllRowsSee) {
  constexpr std::int64_t kTile = 16;
  for (const std::int64_t rows : {1, 4, 7}) {
    for (const std::int64_t offset : {-3, 0, 30, 97, 200}) {
      for (const std::int64_t left : {-1, 2, 50}) {
        Mask mask;
        mask.set_causal(true);
        mask.set_offset(offset);
        if (left >= 0) mask.set_window(left, -1);
        mask.set_kv_lengths({100, 0, 1, 57, 99});
        mask.set_query_lengths({7, 7, 3, 0, 2});
        const PositionRanges t = PositionRanges::all(rows);
        const PositionRanges s = PositionRanges::all(100);
        const LocalMask local = local_mask(mask, 0, 5, t, s);
        ASSERT_EQ(local.obstacle, "");
        const MaskedKeys keys = masked_keys(local, 5, rows, 100, kTile);
        std::int64_t pairs = 0;
        std::int64_t tiles = 0;
        for (std::int64_t b = 0; b < 5; ++b) {
          const BatchKeys& of = keys.batches[static_cast<std::size_t>(b)];
          EXPECT_EQ(of.first_tile, tiles);
          tiles += (of.end - of.begin + kTile - 1) / kTile;
          for (std::int64_t row = 0; row < rows; ++row) {
            std::int64_t others = 0;
            for (std::int64_t column = 0; column < 100; ++column) {
              const bool visible = mask.visible(b, 0, GlobalPosition(row), GlobalPosition(column));
              const bool told = row < of.rows && column < of.columns && column >= row + of.low &&
                                column <= row + of.high;
              ASSERT_EQ(told, visible)
                  << to_string(mask) << " " << b << " " << row << " " << column;
              const bool shared = column >= of.begin && column < of.end;
              if (shared && row < of.rows) {
                ASSERT_TRUE(visible);
              }
              pairs += visible ? 1 : 0;
              others += visible && !shared ? 1 : 0;
            }
            EXPECT_LT(others, std::max<std::int64_t>(rows, 1));
          }
        }
        EXPECT_EQ(keys.batches.back().first_tile, tiles);
        EXPECT_EQ(keys.pairs, pairs);
      }
    }
  }
}

}  // namespace
}  // namespace annulus::test
