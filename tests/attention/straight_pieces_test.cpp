// Blocks cut for kernels that know one straight band, against the mask's definition, pair by pair.
#include <chrono>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/straight_pieces.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

LocalRange range(std::int64_t begin, std::int64_t count) {
  return {LocalPosition(begin), count};
}

bool shows(const LocalMask& local, std::int64_t batch, std::int64_t row, std::int64_t column) {
  const auto b = static_cast<std::size_t>(batch);
  if (local.padded() && (row >= local.row_lengths[b] || column >= local.column_lengths[b])) {
    return false;
  }
  return column - row >= local.band.low && column - row <= local.band.high;
}

std::string describe(const Mask& mask, const PositionRanges& rows, const PositionRanges& columns) {
  return to_string(mask) + ", rows " + to_string(rows) + ", columns " + to_string(columns);
}

// Every visible pair in one piece, nothing else in any, and no edge without a pair.
void expect_exact(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                  const PositionRanges& rows, const PositionRanges& columns,
                  const std::vector<StraightPiece>& pieces) {
  SCOPED_TRACE(describe(mask, rows, columns));
  std::vector<int> seen(static_cast<std::size_t>(batches * rows.size() * columns.size()));
  for (const StraightPiece& piece : pieces) {
    ASSERT_GT(piece.batches, 0);
    ASSERT_LE(piece.first_batch + piece.batches, batches);
    ASSERT_LE(piece.rows.end().value(), rows.size());
    ASSERT_LE(piece.columns.end().value(), columns.size());
    std::int64_t pairs = 0;
    std::set<std::int64_t> seeing;
    std::set<std::int64_t> shown;
    for (std::int64_t b = 0; b < piece.batches; ++b) {
      for (std::int64_t r = 0; r < piece.rows.count; ++r) {
        for (std::int64_t c = 0; c < piece.columns.count; ++c) {
          const std::int64_t batch = piece.first_batch + b;
          const LocalPosition row = piece.rows.begin + r;
          const LocalPosition column = piece.columns.begin + c;
          const bool visible =
              piece.mask.obstacle.empty()
                  ? shows(piece.mask, b, r, c)
                  : mask.visible(first_batch + batch, 0, rows.global(row), columns.global(column));
          if (!visible) continue;
          ++pairs;
          seeing.insert(r);
          shown.insert(c);
          ++seen[static_cast<std::size_t>((batch * rows.size() + row.value()) * columns.size() +
                                          column.value())];
        }
      }
    }
    ASSERT_EQ(piece.pairs, pairs);
    ASSERT_EQ(piece.full(), pairs == piece.batches * piece.rows.count * piece.columns.count);
    ASSERT_GT(pairs, 0);
    ASSERT_EQ(*seeing.begin(), 0);
    ASSERT_EQ(*seeing.rbegin(), piece.rows.count - 1);
    ASSERT_EQ(*shown.begin(), 0);
    ASSERT_EQ(*shown.rbegin(), piece.columns.count - 1);
    if (piece.mask.obstacle.empty()) {
      ASSERT_EQ(static_cast<std::int64_t>(seeing.size()), piece.rows.count);
    }
  }
  for (std::int64_t b = 0; b < batches; ++b) {
    for (std::int64_t r = 0; r < rows.size(); ++r) {
      for (std::int64_t c = 0; c < columns.size(); ++c) {
        const bool visible = mask.visible(first_batch + b, 0, rows.global(LocalPosition(r)),
                                          columns.global(LocalPosition(c)));
        ASSERT_EQ(seen[static_cast<std::size_t>((b * rows.size() + r) * columns.size() + c)],
                  visible ? 1 : 0)
            << "batch " << b << " row " << r << " column " << c;
      }
    }
  }
}

std::vector<StraightPiece> expect_cut(const Mask& mask, std::int64_t batches,
                                      const PositionRanges& rows, const PositionRanges& columns) {
  std::vector<StraightPiece> pieces = straight_pieces(mask, 0, batches, rows, columns);
  expect_exact(mask, 0, batches, rows, columns, pieces);
  for (const StraightPiece& piece : pieces) EXPECT_EQ(piece.mask.obstacle, "");
  return pieces;
}

// The columns of several shards, one after the other.
PositionRanges gathered(const SequenceLayout& layout, const std::vector<int>& ranks) {
  std::vector<PositionRange> all;
  for (const int rank : ranks) {
    for (const PositionRange& part : layout.positions(rank).ranges()) all.push_back(part);
  }
  return PositionRanges(all);
}

Mask causal() {
  Mask mask;
  mask.set_causal(true);
  return mask;
}

// Documents of these lengths in every batch.
Mask documents(const std::vector<std::vector<std::int32_t>>& lengths) {
  std::vector<std::int32_t> ids;
  for (const std::vector<std::int32_t>& batch : lengths) {
    std::int32_t id = 0;
    for (const std::int32_t length : batch) {
      ids.insert(ids.end(), static_cast<std::size_t>(length), id++);
    }
  }
  Mask mask = causal();
  mask.set_segments(static_cast<std::int64_t>(lengths.size()), ids, ids);
  return mask;
}

TEST(StraightPieces, CoverTheMaskExactly) {
  Random random(61);
  constexpr std::int64_t kLength = 48;
  constexpr std::int64_t kBatch = 3;
  int cut = 0;
  int crooked = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    for (int repeat = 0; repeat < 24; ++repeat) {
      const Mask mask = random_mask(random, kinds, kBatch, kLength, kLength);
      const LayoutKind all[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped};
      const int ranks = static_cast<int>(draw(random, 1, 4));
      const LayoutKind kind = all[draw(random, 0, 2)];
      const SequenceLayout layout(kind, kLength, ranks);
      const bool mixed = draw(random, 0, 5) == 0;
      const SequenceLayout other(mixed ? all[draw(random, 0, 2)] : kind, kLength, ranks);
      std::vector<int> from;
      for (int rank = 0; rank < ranks; ++rank) {
        if (draw(random, 0, 1) == 0) from.push_back(rank);
      }
      if (from.empty()) from.push_back(static_cast<int>(draw(random, 0, ranks - 1)));
      std::shuffle(from.begin(), from.end(), random);
      const PositionRanges rows = layout.positions(static_cast<int>(draw(random, 0, ranks - 1)));
      const PositionRanges columns = gathered(other, from);
      const std::int64_t first = draw(random, 0, kBatch - 1);
      const std::int64_t batches = draw(random, 1, kBatch - first);
      const auto pieces = straight_pieces(mask, first, batches, rows, columns);
      expect_exact(mask, first, batches, rows, columns, pieces);
      if (testing::Test::HasFatalFailure()) return;
      if (pieces.size() > 1) ++cut;
      for (const StraightPiece& piece : pieces) {
        if (piece.mask.obstacle.empty()) continue;
        ++crooked;
        EXPECT_TRUE(mixed) << describe(mask, rows, columns) << ": " << piece.mask.obstacle;
      }
    }
  }
  EXPECT_GT(cut, 300);
  EXPECT_GT(crooked, 20);
}

TEST(StraightPieces, StraightBlocksStayWhole) {
  constexpr std::int64_t kLength = 64;
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const SequenceLayout layout(kind, kLength, 4);
    for (int rank = 0; rank < 4; ++rank) {
      for (int origin = 0; origin < 4; ++origin) {
        const auto pieces =
            expect_cut(causal(), 2, layout.positions(rank), layout.positions(origin));
        EXPECT_LE(pieces.size(), 1U) << name_of(kind) << " " << rank << " " << origin;
      }
    }
  }
  Mask padded = causal();
  padded.set_kv_lengths({64, 20, 0});
  padded.set_query_lengths({50, 64, 64});
  const SequenceLayout layout(LayoutKind::contiguous, kLength, 2);
  EXPECT_EQ(expect_cut(padded, 3, layout.positions(0), layout.positions(0)).size(), 1U);
}

TEST(StraightPieces, GatheredShardsAreCutWhereTheDiagonalBreaks) {
  const SequenceLayout striped(LayoutKind::striped, 64, 4);
  // A diagonal for each residue class.
  EXPECT_EQ(expect_cut(causal(), 1, striped.positions(2), gathered(striped, {0, 1, 2, 3})).size(),
            4U);
  const SequenceLayout zigzag(LayoutKind::zigzag, 64, 4);
  // Columns 0–7 and 56–63, 8–15 and 48–55, …: rows 16–23 see three stretches, rows 40–47 more.
  const auto pieces = expect_cut(causal(), 1, zigzag.positions(2), gathered(zigzag, {0, 1, 2, 3}));
  EXPECT_LE(pieces.size(), 7U);
  // In order of position it takes one cut, between the two runs of rows.
  EXPECT_LE(expect_cut(causal(), 1, zigzag.positions(2), PositionRanges::all(64)).size(), 2U);
}

TEST(StraightPieces, WindowsOverTwoRunsAreCutApart) {
  Mask mask;
  mask.set_window(3, 3);
  const PositionRanges zigzag = SequenceLayout(LayoutKind::zigzag, 64, 4).positions(1);
  const auto pieces = expect_cut(mask, 1, zigzag, zigzag);
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[0].rows, range(0, 8));
  EXPECT_EQ(pieces[0].columns, range(0, 8));
  EXPECT_EQ(pieces[1].rows, range(8, 8));
  EXPECT_EQ(pieces[1].columns, range(8, 8));
}

TEST(StraightPieces, OneForEachDocument) {
  const Mask mask = documents({{10, 30, 4, 20}});
  const PositionRanges all = PositionRanges::all(64);
  const auto pieces = expect_cut(mask, 1, all, all);
  ASSERT_EQ(pieces.size(), 4U);
  EXPECT_EQ(pieces[1].rows, range(10, 30));
  EXPECT_EQ(pieces[1].columns, range(10, 30));
  EXPECT_EQ(pieces[1].mask.band.high, 0);
  EXPECT_FALSE(pieces[1].mask.padded());
  EXPECT_EQ(pieces[1].pairs, 30 * 31 / 2);
  // What a later shard needs of an earlier one is the document that they share.
  const SequenceLayout halves(LayoutKind::contiguous, 64, 2);
  const auto shared = expect_cut(mask, 1, halves.positions(1), halves.positions(0));
  ASSERT_EQ(shared.size(), 1U);
  EXPECT_TRUE(shared[0].full());
  EXPECT_EQ(shared[0].rows, range(0, 8));
  EXPECT_EQ(shared[0].columns, range(10, 22));
  // A document over both runs of a zigzag shard is one piece too.
  const SequenceLayout zigzag(LayoutKind::zigzag, 64, 2);
  const Mask wide = documents({{8, 50, 6}});
  EXPECT_EQ(expect_cut(wide, 1, zigzag.positions(0), zigzag.positions(0)).size(), 3U);
  // Documents of strided shards are straight as well.
  const SequenceLayout striped(LayoutKind::striped, 64, 4);
  EXPECT_EQ(expect_cut(mask, 1, striped.positions(3), striped.positions(1)).size(), 4U);
}

TEST(StraightPieces, BatchesWithTheSameDocumentsShareTheirPieces) {
  const PositionRanges all = PositionRanges::all(64);
  const Mask same = documents({{10, 30, 24}, {10, 30, 24}, {10, 30, 24}});
  const auto pieces = expect_cut(same, 3, all, all);
  ASSERT_EQ(pieces.size(), 3U);
  for (const StraightPiece& piece : pieces) {
    EXPECT_EQ(piece.batches, 3);
    EXPECT_FALSE(piece.mask.padded());
  }
  // The middle one differs from the others, but for the last document.
  const Mask differ = documents({{10, 30, 24}, {30, 10, 24}, {10, 30, 24}});
  EXPECT_EQ(expect_cut(differ, 3, all, all).size(), 7U);
}

TEST(StraightPieces, BatchesWhoseColumnsEndDifferentlyHaveLengths) {
  // The rows are in one document in both batches, which goes on for 6 and 10 more columns.
  const Mask mask = documents({{14, 18}, {18, 14}});
  const PositionRanges rows({{GlobalPosition(4), 4}});
  const PositionRanges columns({{GlobalPosition(0), 24}});
  Mask both_ways = mask;
  both_ways.set_causal(false);
  const auto pieces = expect_cut(both_ways, 2, rows, columns);
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_EQ(pieces[0].columns, range(0, 18));
  EXPECT_EQ(pieces[0].mask.column_lengths, (std::vector<std::int32_t>{14, 18}));
}

TEST(StraightPieces, RunsOfDifferentStridesKeepWhatIsFull) {
  // Rows 32–47 in order against every fourth column: the first eight are in front of all rows.
  const PositionRanges rows({{GlobalPosition(32), 16}});
  const PositionRanges columns = SequenceLayout(LayoutKind::striped, 64, 4).positions(1);
  const auto pieces = straight_pieces(causal(), 0, 1, rows, columns);
  expect_exact(causal(), 0, 1, rows, columns, pieces);
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_TRUE(pieces[0].full());
  EXPECT_EQ(pieces[0].columns, range(0, 8));
  EXPECT_THAT(pieces[1].mask.obstacle, HasSubstr("diagonal"));
  EXPECT_EQ(pieces[1].columns, range(8, 4));
}

TEST(StraightPieces, NotMoreThanAsked) {
  const Mask mask = documents({{10, 30, 4, 20}});
  const PositionRanges all = PositionRanges::all(64);
  EXPECT_EQ(straight_pieces(mask, 0, 1, all, all, 4).size(), 4U);
  const auto pieces = straight_pieces(mask, 0, 1, all, all, 3);
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_THAT(pieces[0].mask.obstacle, HasSubstr("3 straight pieces"));
  EXPECT_EQ(pieces[0].rows, range(0, 64));
  EXPECT_EQ(pieces[0].columns, range(0, 64));
  EXPECT_EQ(pieces[0].pairs, 10 * 11 / 2 + 30 * 31 / 2 + 4 * 5 / 2 + 20 * 21 / 2);
}

TEST(StraightPieces, NothingOfNothing) {
  const PositionRanges all = PositionRanges::all(8);
  EXPECT_TRUE(straight_pieces(causal(), 0, 1, {}, all).empty());
  EXPECT_TRUE(straight_pieces(causal(), 0, 1, all, {}).empty());
  EXPECT_TRUE(straight_pieces(causal(), 0, 0, all, all).empty());
  Mask blind = causal();
  blind.set_offset(-8);
  EXPECT_TRUE(straight_pieces(blind, 0, 1, all, all).empty());
}

// Quadratic work would take an hour.
TEST(StraightPieces, ManyDocumentsCostWhatTheyAre) {
  constexpr std::int64_t kDocuments = 200000;
  const Mask mask = documents({std::vector<std::int32_t>(kDocuments, 5)});
  const SequenceLayout layout(LayoutKind::zigzag, 5 * kDocuments, 4);
  const auto start = std::chrono::steady_clock::now();
  std::int64_t pairs = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (int origin = 0; origin < 4; ++origin) {
      const PositionRanges rows = layout.positions(rank);
      for (const StraightPiece& p : straight_pieces(mask, 0, 1, rows, layout.positions(origin))) {
        pairs += p.pairs;
      }
    }
  }
  EXPECT_EQ(pairs, kDocuments * 15);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace annulus::test
