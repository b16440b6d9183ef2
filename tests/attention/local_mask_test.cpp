// The band that cuDNN is given, against the mask's definition, pair by pair.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/local_mask.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

constexpr std::int64_t kLength = 60;
constexpr std::int64_t kBatch = 2;

struct Block {
  PositionRanges rows;
  PositionRanges columns;
};

Block block_of(const PositionRanges& rows, const PositionRanges& columns) {
  return {rows, columns};
}

LocalMask local_mask(const Mask& mask, const Block& block) {
  return annulus::local_mask(mask, 0, kBatch, block.rows, block.columns);
}

bool shows(const Band& band, std::int64_t row, std::int64_t column) {
  const std::int64_t distance = column - row;
  return distance >= band.low && distance <= band.high;
}

void expect_as_defined(const Mask& mask, const Block& block, const Band& band) {
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t r = 0; r < block.rows.size(); ++r) {
      for (std::int64_t c = 0; c < block.columns.size(); ++c) {
        ASSERT_EQ(shows(band, r, c), mask.visible(b, 0, block.rows.global(LocalPosition(r)),
                                                  block.columns.global(LocalPosition(c))))
            << to_string(mask) << ", rows " << to_string(block.rows) << ", columns "
            << to_string(block.columns) << ", row " << r << " column " << c;
      }
    }
  }
}

PositionRanges random_positions(Random& random) {
  const LayoutKind kinds[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped};
  const int ranks = static_cast<int>(draw(random, 1, 4));
  const SequenceLayout layout(kinds[draw(random, 0, 2)], kLength, ranks);
  const PositionRanges all = layout.positions(static_cast<int>(draw(random, 0, ranks - 1)));
  const std::int64_t begin = draw(random, 0, all.size() - 1);
  return draw(random, 0, 1) == 0
             ? all
             : all.slice({LocalPosition(begin), draw(random, 1, all.size() - begin)});
}

TEST(LocalMask, SaysWhatTheMaskSays) {
  Random random(41);
  int bands = 0;
  int obstacles = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    for (int repeat = 0; repeat < 60; ++repeat) {
      const Mask mask = random_mask(random, kinds, kBatch, kLength, kLength);
      const PositionRanges rows = random_positions(random);
      const PositionRanges columns = draw(random, 0, 2) == 0 ? rows : random_positions(random);
      const Block block = block_of(rows, columns);
      const LocalMask local = local_mask(mask, block);
      if (!local.obstacle.empty()) {
        ++obstacles;
        continue;
      }
      if (local.band.limited()) ++bands;
      expect_as_defined(mask, block, local.band);
    }
  }
  EXPECT_GT(bands, 200);
  EXPECT_GT(obstacles, 200);
}

TEST(LocalMask, OwnBlocksAndPrefixesOfCausalRings) {
  Mask mask;
  mask.set_causal(true);
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    for (int rank = 0; rank < 4; ++rank) {
      const PositionRanges own = SequenceLayout(kind, kLength, 4).positions(rank);
      const Block block = block_of(own, own);
      const LocalMask local = local_mask(mask, block);
      ASSERT_EQ(local.obstacle, "");
      EXPECT_EQ(local.band.high, 0);
      expect_as_defined(mask, block, local.band);
    }
  }
  // A prefix gathered in pieces.
  const Block block = block_of(PositionRanges({{GlobalPosition(20), 10}}),
                               PositionRanges({{GlobalPosition(0), 10}, {GlobalPosition(10), 20}}));
  const LocalMask local = local_mask(mask, block);
  ASSERT_EQ(local.obstacle, "");
  EXPECT_EQ(local.band.high, 20);
  expect_as_defined(mask, block, local.band);
}

TEST(LocalMask, SidesThatHideNothingAreUnlimited) {
  Mask mask;
  mask.set_causal(true);
  mask.set_window(25, -1);
  const Block block = block_of(PositionRanges({{GlobalPosition(20), 10}}),
                               PositionRanges({{GlobalPosition(5), 15}}));
  EXPECT_FALSE(local_mask(mask, block).band.limited());
  mask.set_window(23, -1);
  EXPECT_EQ(local_mask(mask, block).band.low, -8);
  EXPECT_EQ(local_mask(mask, block).band.high, Band::kUnlimited);
}

TEST(LocalMask, ObstaclesAreNamed) {
  Mask mask;
  mask.set_kv_lengths({30, 60});
  const Block block = block_of(PositionRanges::all(kLength), PositionRanges::all(kLength));
  EXPECT_THAT(local_mask(mask, block).obstacle, ::testing::HasSubstr("lengths"));
  Mask window;
  window.set_window(3, 3);
  const PositionRanges zigzag = SequenceLayout(LayoutKind::zigzag, kLength, 4).positions(1);
  EXPECT_THAT(local_mask(window, block_of(zigzag, zigzag)).obstacle,
              ::testing::HasSubstr("diagonal"));
}

}  // namespace
}  // namespace annulus::test
