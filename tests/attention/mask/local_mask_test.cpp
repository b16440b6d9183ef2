// The band and the lengths that cuDNN is given, against the mask's definition, pair by pair.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/local_mask.hpp>

#include "tests/attention/flash/flash_list_cases.hpp"

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

bool shows(const LocalMask& local, std::int64_t batch, std::int64_t row, std::int64_t column) {
  const auto b = static_cast<std::size_t>(batch);
  if (local.padded() && (row >= local.row_lengths[b] || column >= local.column_lengths[b])) {
    return false;
  }
  const std::int64_t distance = column - row;
  return distance >= local.band.low && distance <= local.band.high;
}

void expect_as_defined(const Mask& mask, const Block& block, const LocalMask& local) {
  ASSERT_EQ(local.row_lengths.size(), local.column_lengths.size());
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t r = 0; r < block.rows.size(); ++r) {
      for (std::int64_t c = 0; c < block.columns.size(); ++c) {
        ASSERT_EQ(shows(local, b, r, c), mask.visible(b, 0, block.rows.global(LocalPosition(r)),
                                                      block.columns.global(LocalPosition(c))))
            << to_string(mask) << ", rows " << to_string(block.rows) << ", columns "
            << to_string(block.columns) << ", batch " << b << " row " << r << " column " << c;
      }
    }
  }
}

// Kernels rely on this: no batch has rows without columns or columns without rows, and the left
// side of the band leaves every row within a length some column.
void expect_lengths_in_order(const Block& block, const LocalMask& local) {
  bool cut = false;
  for (std::size_t b = 0; b < local.row_lengths.size(); ++b) {
    const std::int64_t rows = local.row_lengths[b];
    const std::int64_t columns = local.column_lengths[b];
    ASSERT_EQ(rows == 0, columns == 0);
    ASSERT_LE(rows, block.rows.size());
    ASSERT_LE(columns, block.columns.size());
    cut = cut || rows < block.rows.size() || columns < block.columns.size();
    if (rows > 0 && local.band.low != -Band::kUnlimited) {
      ASSERT_LE(local.band.low, columns - rows);
    }
  }
  EXPECT_EQ(cut, local.padded());
}

TEST(LocalMask, SaysWhatTheMaskSays) {
  Random random(41);
  int bands = 0;
  int padded = 0;
  int both = 0;
  int obstacles = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    for (int repeat = 0; repeat < 60; ++repeat) {
      const Mask mask = random_mask(random, kinds, kBatch, kLength, kLength);
      const PositionRanges rows = random_positions(random, kLength);
      const PositionRanges columns =
          draw(random, 0, 2) == 0 ? rows : random_positions(random, kLength);
      const Block block = block_of(rows, columns);
      const LocalMask local = local_mask(mask, block);
      if (!local.obstacle.empty()) {
        ++obstacles;
        continue;
      }
      if (local.band.limited()) ++bands;
      if (local.padded()) ++padded;
      if (local.band.limited() && local.padded()) ++both;
      expect_as_defined(mask, block, local);
      expect_lengths_in_order(block, local);
    }
  }
  EXPECT_GT(bands, 200);
  EXPECT_GT(padded, 200);
  EXPECT_GT(both, 100);
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
      expect_as_defined(mask, block, local);
    }
  }
  // A prefix gathered in pieces.
  const Block block = block_of(PositionRanges({{GlobalPosition(20), 10}}),
                               PositionRanges({{GlobalPosition(0), 10}, {GlobalPosition(10), 20}}));
  const LocalMask local = local_mask(mask, block);
  ASSERT_EQ(local.obstacle, "");
  EXPECT_EQ(local.band.high, 20);
  expect_as_defined(mask, block, local);
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

void expect_lengths(const Mask& mask, const Block& block, const std::vector<std::int32_t>& rows,
                    const std::vector<std::int32_t>& columns) {
  const LocalMask local = local_mask(mask, block);
  ASSERT_EQ(local.obstacle, "");
  EXPECT_EQ(local.row_lengths, rows);
  EXPECT_EQ(local.column_lengths, columns);
  expect_as_defined(mask, block, local);
}

TEST(LocalMask, LengthsAreThoseOfTheBlock) {
  Mask mask;
  mask.set_causal(true);
  mask.set_query_lengths({60, 25});
  mask.set_kv_lengths({43, 60});
  const PositionRanges all = PositionRanges::all(kLength);
  expect_lengths(mask, block_of(all, all), {60, 25}, {43, 60});
  // Nothing of batch 1 is left.
  const PositionRanges late({{GlobalPosition(30), 20}});
  expect_lengths(mask, block_of(late, late), {20, 0}, {13, 0});
  // Nobody is cut.
  const PositionRanges early({{GlobalPosition(5), 20}});
  expect_lengths(mask, block_of(early, early), {}, {});
  const PositionRanges striped = SequenceLayout(LayoutKind::striped, kLength, 4).positions(1);
  expect_lengths(mask, block_of(striped, striped), {15, 6}, {11, 15});
  // Both ranges of a zigzag shard at once, 16 to 23 and 39 to 45, some columns missing or not.
  const PositionRanges zigzag = SequenceLayout(LayoutKind::zigzag, kLength, 4).positions(2);
  expect_lengths(mask, block_of(zigzag, zigzag), {15, 8}, {12, 15});
  expect_lengths(mask, block_of(zigzag, zigzag.slice({LocalPosition(0), 13})), {15, 8}, {12, 13});
  EXPECT_EQ(local_mask(mask, block_of(zigzag, zigzag)).band.high, 0);
}

TEST(LocalMask, SegmentsArePaddingWhereOneDocumentIsLeft) {
  // Batch 0: documents of 20, 30 and 10. Batch 1: one of 45, and padding.
  std::vector<std::int32_t> ids(kBatch * kLength, 0);
  std::fill(ids.begin() + 20, ids.begin() + 50, 1);
  std::fill(ids.begin() + 50, ids.begin() + 60, 2);
  std::fill(ids.begin() + 60 + 45, ids.end(), -1);
  Mask mask;
  mask.set_segments(kBatch, ids, ids);
  const PositionRanges third({{GlobalPosition(40), 20}});
  const PositionRanges second({{GlobalPosition(20), 20}});
  const PositionRanges first({{GlobalPosition(0), 20}});
  // Rows of two documents, columns of the first of them.
  expect_lengths(mask, block_of(third, second), {10, 5}, {20, 20});
  expect_lengths(mask, block_of(second, third), {20, 20}, {10, 5});
  // Nothing of batch 0.
  expect_lengths(mask, block_of(third, first), {0, 5}, {0, 20});
  expect_lengths(mask, block_of(second, second), {}, {});
  // Two documents.
  EXPECT_THAT(local_mask(mask, block_of(third, third)).obstacle, ::testing::HasSubstr("batch 0"));
  // The second of them: no prefix.
  const PositionRanges end({{GlobalPosition(50), 10}});
  EXPECT_THAT(local_mask(mask, block_of(third, end)).obstacle, ::testing::HasSubstr("batch 0"));
}

TEST(LocalMask, RowsThatAWindowLeavesNothingAreBeyondTheLength) {
  Mask mask;
  mask.set_window(4, 4);
  mask.set_kv_lengths({30, 60});
  const Block block = block_of(PositionRanges::all(kLength), PositionRanges::all(kLength));
  const LocalMask local = local_mask(mask, block);
  ASSERT_EQ(local.obstacle, "");
  EXPECT_EQ(local.row_lengths, (std::vector<std::int32_t>{34, 60}));
  EXPECT_EQ(local.column_lengths, (std::vector<std::int32_t>{30, 60}));
  expect_as_defined(mask, block, local);
}

TEST(LocalMask, ObstaclesAreNamed) {
  Mask lengths;
  lengths.set_kv_lengths({30, 60});
  // The columns of two zigzag shards as they were gathered: what is visible is not their beginning.
  const PositionRanges gathered(
      {{GlobalPosition(0), 10}, {GlobalPosition(50), 10}, {GlobalPosition(10), 10}});
  EXPECT_THAT(local_mask(lengths, block_of(PositionRanges::all(kLength), gathered)).obstacle,
              ::testing::HasSubstr("first rows and columns"));
  Mask window;
  window.set_window(3, 3);
  const PositionRanges zigzag = SequenceLayout(LayoutKind::zigzag, kLength, 4).positions(1);
  EXPECT_THAT(local_mask(window, block_of(zigzag, zigzag)).obstacle,
              ::testing::HasSubstr("diagonal"));
}

}  // namespace
}  // namespace annulus::test
