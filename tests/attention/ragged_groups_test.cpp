// Straight pieces grouped for kernels that take many sequences of different lengths at once.
#include "ragged_groups.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

bool shows(const Band& band, std::int64_t row, std::int64_t column) {
  return column - row >= band.low && column - row <= band.high;
}

RaggedGroups groups_of(const Mask& mask, std::int64_t batches, const PositionRanges& rows,
                       const PositionRanges& columns) {
  return ragged_groups(straight_pieces(mask, 0, batches, rows, columns), batches, rows.size());
}

void expect_exact(const Mask& mask, std::int64_t batches, const PositionRanges& rows,
                  const PositionRanges& columns, const RaggedGroups& groups) {
  std::vector<int> seen(static_cast<std::size_t>(batches * rows.size() * columns.size()));
  std::vector<bool> computed(static_cast<std::size_t>(batches * rows.size()));
  const auto index = [&](std::int64_t b, std::int64_t r, std::int64_t c) {
    return static_cast<std::size_t>((b * rows.size() + r) * columns.size() + c);
  };
  for (const RaggedGroup& group : groups.groups) {
    for (const RaggedSequence& sequence : group.sequences) {
      ASSERT_GE(group.most_rows, sequence.rows.count);
      ASSERT_GE(group.most_columns, sequence.columns.count);
      ASSERT_TRUE(group.most_rows == kRaggedTile || group.most_rows < 2 * sequence.rows.count);
      for (std::int64_t r = 0; r < sequence.rows.count; ++r) {
        const std::int64_t row = sequence.rows.begin.value() + r;
        ASSERT_FALSE(computed[static_cast<std::size_t>(sequence.batch * rows.size() + row)]);
        computed[static_cast<std::size_t>(sequence.batch * rows.size() + row)] = true;
        for (std::int64_t c = 0; c < sequence.columns.count; ++c) {
          if (shows(group.band, r, c)) {
            ++seen[index(sequence.batch, row, sequence.columns.begin.value() + c)];
          }
        }
      }
    }
  }
  EXPECT_EQ(groups.every_row, std::count(computed.begin(), computed.end(), false) == 0);
  for (std::int64_t b = 0; b < batches; ++b) {
    for (std::int64_t r = 0; r < rows.size(); ++r) {
      for (std::int64_t c = 0; c < columns.size(); ++c) {
        ASSERT_EQ(
            seen[index(b, r, c)],
            mask.visible(b, 0, rows.global(LocalPosition(r)), columns.global(LocalPosition(c))) ? 1
                                                                                                : 0)
            << b << " " << r << " " << c;
      }
    }
  }
}

TEST(RaggedGroups, ShowWhatTheMaskShows) {
  Random random(71);
  int taken = 0;
  int refused = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      const Mask mask = random_mask(random, kinds, 2, 60, 60);
      const SequenceLayout layout(
          draw(random, 0, 1) == 0 ? LayoutKind::contiguous : LayoutKind::striped, 60, 3);
      const PositionRanges rows = layout.positions(static_cast<int>(draw(random, 0, 2)));
      const PositionRanges columns =
          draw(random, 0, 1) == 0 ? rows : layout.positions(static_cast<int>(draw(random, 0, 2)));
      const RaggedGroups groups = groups_of(mask, 2, rows, columns);
      if (!groups.obstacle.empty()) {
        ++refused;
        EXPECT_TRUE(groups.groups.empty());
        continue;
      }
      ++taken;
      expect_exact(mask, 2, rows, columns, groups);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  EXPECT_GT(taken, 300);
  EXPECT_GT(refused, 0);
}

TEST(RaggedGroups, ThousandsOfDocumentsTakeAFewCalls) {
  Random random(72);
  std::vector<std::int32_t> ids;
  for (std::int32_t id = 0; id < 2000; ++id) {
    const std::int64_t length = draw(random, 1, draw(random, 0, 49) == 0 ? 4000 : 60);
    ids.insert(ids.end(), static_cast<std::size_t>(length), id);
  }
  Mask mask;
  mask.set_causal(true);
  mask.set_window(100, -1);
  mask.set_segments(1, ids, ids);
  const PositionRanges all = PositionRanges::all(static_cast<std::int64_t>(ids.size()));
  const RaggedGroups groups = groups_of(mask, 1, all, all);
  ASSERT_EQ(groups.obstacle, "");
  EXPECT_TRUE(groups.every_row);
  // One band: up to 128 rows, up to 256, … up to 4096.
  EXPECT_LE(groups.groups.size(), 6U);
  std::size_t sequences = 0;
  for (const RaggedGroup& group : groups.groups) sequences += group.sequences.size();
  EXPECT_EQ(sequences, 2000U);
}

TEST(RaggedGroups, RowsOfTwoPiecesAreRefused) {
  Mask mask;
  mask.set_causal(true);
  const SequenceLayout striped(LayoutKind::striped, 64, 2);
  std::vector<PositionRange> gathered;
  for (const int rank : {0, 1}) {
    for (const PositionRange& range : striped.positions(rank).ranges()) gathered.push_back(range);
  }
  EXPECT_THAT(groups_of(mask, 1, striped.positions(0), PositionRanges(gathered)).obstacle,
              HasSubstr("two straight pieces"));
  EXPECT_THAT(groups_of(mask, 1, PositionRanges::all(64), striped.positions(0)).obstacle,
              HasSubstr("diagonal"));
}

}  // namespace
}  // namespace annulus::test
