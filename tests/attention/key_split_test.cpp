// How thread blocks share key tiles: every tile once, in even shares, in parts with names of their
// own.
#include "flash/decode/key_split.hpp"

#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace annulus::test {
namespace {

using flash::decode::KeySplit;

TEST(KeySplit, CoversEveryTileOnceInEvenShares) {
  for (const std::int64_t pairs : {1, 2, 3, 8, 31, 128, 133, 1000}) {
    for (const std::int64_t tiles_of_pair : {1, 2, 7, 64, 1023}) {
      for (const std::int64_t blocks : {1, 2, 3, 16, 131, 132}) {
        const KeySplit split{pairs, tiles_of_pair, blocks};
        if (blocks > split.tiles()) continue;
        const std::int64_t least = split.tiles() / blocks;
        EXPECT_EQ(split.first_tile(0), 0);
        EXPECT_EQ(split.first_tile(blocks), split.tiles());
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
        const KeySplit split{pairs, tiles_of_pair, blocks};
        if (blocks > split.tiles()) continue;
        std::set<std::pair<std::int64_t, std::int64_t>> met;  // pair and block
        for (std::int64_t tile = 0; tile < split.tiles(); ++tile) {
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
  const KeySplit split{512, 1 << 20, 132};
  EXPECT_EQ(split.first_tile(132), split.tiles());
  EXPECT_EQ(split.block_of(split.tiles() - 1), 131);
}

}  // namespace
}  // namespace annulus::test
