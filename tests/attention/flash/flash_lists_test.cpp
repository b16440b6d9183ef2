// The tiles that the flash kernel is told to visit, against the mask's definition, pair by pair.
// The device functions that list them run on the CPU.
#include <utility>

#include <gmock/gmock.h>

#include "tests/attention/flash/flash_list_cases.hpp"
#include "tests/attention/flash/host_lists.hpp"

namespace annulus::flash {
namespace {

using test::draw;
using test::ListCase;
using test::MaskKind;
using test::Random;

HostLists lists_of(const ListCase& one) {
  return make_lists(one.plan());
}

// The kernel's test of a pair in a masked tile.
bool shows(const KeySegment& segment, const QueryTile& tile, std::int64_t row,
           std::int64_t column) {
  const std::int64_t ahead = tile.row_stride * row;
  return column < segment.columns && segment.low + ahead <= segment.stride * column &&
         segment.stride * column <= segment.high + ahead;
}

// Walks through the lists of `plan` as the kernel does. The mask of `plan` may have other numbers
// than the mask of `one`.
class Walk {
 public:
  Walk(const ListCase& one, const ListPlan& plan, const HostLists& lists)
      : one_(one), mask_(one.mask), plan_(plan), lists_(lists) {}

  // Every visible pair is met exactly once, and no other; no tile is in vain.
  void expect_as_defined() {
    SCOPED_TRACE(to_string(one_));
    ASSERT_LE(std::ssize(lists_.segments), plan_.most_segments());
    const auto columns = one_.columns.size();
    for (std::int64_t list_of = 0; list_of < one_.of.batches * one_.of.heads; ++list_of) {
      const std::int64_t b = list_of / one_.of.heads;
      const std::int64_t h = list_of % one_.of.heads;
      met_.assign(static_cast<std::size_t>(one_.rows.size() * columns), 0);
      std::vector<int> row_met(static_cast<std::size_t>(one_.rows.size()), 0);
      const std::int64_t list =
          (plan_.batches() > 1 ? b : 0) * plan_.heads() + (plan_.heads() > 1 ? h : 0);
      const auto first = static_cast<std::size_t>(list * plan_.tiles_per_list());
      for (std::size_t t = 0; t < static_cast<std::size_t>(plan_.tiles_per_list()); ++t) {
        const QueryTile& tile = lists_.tiles[first + t];
        if (t > 0) {
          EXPECT_LE(tile.key_tiles, lists_.tiles[first + t - 1].key_tiles);
        }
        for (int r = 0; r < tile.rows; ++r) ++row_met[static_cast<std::size_t>(tile.first_row + r)];
        visit(b, h, tile);
      }
      EXPECT_THAT(row_met, testing::Each(1));
      for (std::int64_t i = 0; i < std::ssize(met_); ++i) {
        ASSERT_EQ(met_[static_cast<std::size_t>(i)], visible(b, h, i / columns, i % columns))
            << "batch " << b << " head " << h << " pair " << i / columns << ", " << i % columns;
      }
    }
  }

 private:
  [[nodiscard]] bool visible(std::int64_t batch, std::int64_t head, std::int64_t row,
                             std::int64_t column) const {
    return mask_.visible(one_.of.first_batch + batch, one_.of.first_head + head,
                         one_.rows.global(LocalPosition(row)),
                         one_.columns.global(LocalPosition(column)));
  }
  // As the kernel finds out.
  [[nodiscard]] bool keys_show(std::int64_t batch, const KeySegment& segment, std::int64_t row,
                               std::int64_t c) const {
    const std::int64_t list = plan_.batches() > 1 ? batch : 0;
    const auto row_at = static_cast<std::size_t>(list * one_.rows.size() + row);
    if (!lists_.row_keys.empty()) {
      const RowKeys& keys = lists_.row_keys[row_at];
      const bool opening = (segment.flags & KeySegment::kOpening) != 0;
      const Document& shown = opening ? keys.opening : keys.rest;
      const std::int64_t position = segment.start + c * segment.stride;
      if (position < shown.begin || position >= shown.end) return false;
    }
    if (!lists_.row_ids.empty()) {
      const std::int64_t column = list * one_.columns.size() + segment.first_column + c;
      return lists_.row_ids[row_at] >= 0 &&
             lists_.row_ids[row_at] == lists_.column_ids[static_cast<std::size_t>(column)];
    }
    return true;
  }

  void visit(std::int64_t batch, std::int64_t head, const QueryTile& tile) {
    std::int32_t key_tiles = 0;
    for (std::int32_t s = 0; s < tile.segments; ++s) {
      const KeySegment& segment = lists_.segments[static_cast<std::size_t>(tile.first_segment + s)];
      key_tiles += segment.tiles;
      for (std::int32_t t = 0; t < segment.tiles; ++t) visit(batch, head, tile, segment, t);
    }
    EXPECT_EQ(key_tiles, tile.key_tiles);
  }

  void visit(std::int64_t batch, std::int64_t head, const QueryTile& tile,
             const KeySegment& segment, std::int32_t t) {
    int seen = 0;
    bool hidden = false;
    const std::int64_t width = one_.tile_columns;
    for (std::int64_t r = 0; r < tile.live_rows; ++r) {
      for (std::int64_t c = t * width; c < (t + 1) * width; ++c) {
        const std::int64_t row = tile.first_row + r;
        const std::int64_t column = segment.first_column + c;
        if ((segment.flags & KeySegment::kMasked) != 0 &&
            !(shows(segment, tile, r, c) && keys_show(batch, segment, row, c))) {
          hidden = hidden || column < one_.columns.size();
          continue;
        }
        ASSERT_LT(column, one_.columns.size());
        ++seen;
        ++met_[static_cast<std::size_t>(row * one_.columns.size() + column)];
        // All tiles lie in visible blocks, whatever else the mask hides in them.
        if (mask_.block_mask()) {
          ASSERT_TRUE(mask_.block_mask()->visible(
              one_.of.first_batch + batch, one_.of.first_head + head,
              one_.rows.global(LocalPosition(row)), one_.columns.global(LocalPosition(column))));
        }
      }
    }
    // A tile may show nothing in two cases. Its rows and columns may have common ids only where
    // positions hide the pairs. The pairs that positions show may lie between strided rows and
    // columns.
    const bool strided = segment.stride != 1 || tile.row_stride != 1;
    if (!mask_.position_parts().limited() || (!mask_.has_segments() && !strided)) {
      EXPECT_GT(seen, 0);
    }
    if (!hidden) return;
    EXPECT_NE(segment.flags & KeySegment::kHidesValues, 0);
    EXPECT_TRUE(plan_.may_hide_values());
  }

  const ListCase& one_;
  const Mask& mask_;
  const ListPlan& plan_;
  const HostLists& lists_;
  std::vector<int> met_;
};

HostLists expect_as_defined(const ListCase& one) {
  const ListPlan plan = one.plan();
  HostLists lists = make_lists(plan);
  Walk(one, plan, lists).expect_as_defined();
  return lists;
}

TEST(FlashLists, MeetEveryVisiblePairOnce) {
  Random random(43);
  int full = 0;
  int several = 0;
  int by_head = 0;
  int documents = 0;
  int ids = 0;
  for (const std::vector<MaskKind>& kinds : test::all_combinations()) {
    for (int repeat = 0; repeat < 30; ++repeat) {
      const ListCase one = test::random_list_case(random, kinds, 60, 8, 6);
      const HostLists lists = expect_as_defined(one);
      if (HasFailure()) return;
      for (const KeySegment& segment : lists.segments) {
        if ((segment.flags & KeySegment::kMasked) == 0) ++full;
      }
      for (const QueryTile& tile : lists.tiles) {
        if (tile.segments > 3) ++several;
      }
      if (one.plan().heads() > 1) ++by_head;
      if (!lists.row_keys.empty()) ++documents;
      if (!lists.row_ids.empty()) ++ids;
    }
  }
  EXPECT_GT(full, 1000);
  EXPECT_GT(several, 100);
  EXPECT_GT(by_head, 100);
  EXPECT_GT(documents, 100);
  EXPECT_GT(ids, 100);
}

// The keys of a run of queries are found whatever ids precede it.
TEST(FlashLists, IdsMayFall) {
  ListCase one;
  one.mask.set_segments(1, {3, 3, 1, 1, 2, 2, 0, 0}, {0, 0, 0, 1, 1, 1, 2, 2});
  one.of = {0, 1, 0, 1};
  one.rows = one.columns = PositionRanges::all(8);
  one.tile_rows = 4;
  one.tile_columns = 2;
  expect_as_defined(one);
}

// Blocks of whole tiles, which need fewer segments, in rows of more than one word.
TEST(FlashLists, MeetEveryVisiblePairOfWholeBlocksOnce) {
  Random random(52);
  const std::vector<std::vector<MaskKind>> all = test::all_combinations();
  for (int repeat = 0; repeat < 30; ++repeat) {
    const auto kinds = static_cast<std::size_t>(draw(random, 0, std::ssize(all) - 1));
    ListCase one = test::random_list_case(random, all[kinds], 600, 12, 6);
    one.mask.set_block_mask(
        BlockMask::random(600, 600, 5, 0.1 * static_cast<double>(draw(random, 0, 10)),
                          static_cast<std::uint64_t>(repeat), {draw(random, 1, 3) * 12, 6}));
    expect_as_defined(one);
    if (HasFailure()) return;
  }
}

// Bands far beyond the sequence, and blocks larger than it.
TEST(FlashLists, MeetEveryVisiblePairAtFarDistancesOnce) {
  const PositionRanges far({{GlobalPosition((std::int64_t{1} << 28) - 40), 40, 1}});
  const PositionRanges near = PositionRanges::all(50);
  for (const std::int64_t shift :
       {std::int64_t{0}, std::int64_t{1} << 28, (std::int64_t{1} << 29) + 7,
        (std::int64_t{1} << 30) - 1, std::int64_t{1} << 30, std::int64_t{1} << 48}) {
    for (const std::int64_t sign : {-1, 1}) {
      for (const std::int64_t window : {std::int64_t{-1}, std::int64_t{20}, shift}) {
        for (const bool causal : {false, true}) {
          ListCase one{{}, {}, far, near};
          one.mask.set_offset(sign * shift);
          one.mask.set_window(window, -1);
          one.mask.set_causal(causal);
          expect_as_defined(one);
          std::swap(one.rows, one.columns);
          one.mask.set_block_mask(BlockMask({1, 1}, {std::int64_t{1} << 40, std::int64_t{1} << 40},
                                            std::vector<std::uint8_t>{1}));
          expect_as_defined(one);
        }
      }
    }
  }
}

// A plan made for other lengths and offsets, or for none, has room for the lists of every call.
TEST(FlashLists, OfCallArgumentsAreThoseOfTheirNumbers) {
  Random random(53);
  constexpr std::int64_t kLength = 60;
  for (const std::vector<MaskKind>& kinds : test::all_combinations()) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      ListCase one = test::random_list_case(random, kinds, kLength, 8, 6);
      AttentionProblem planned;
      planned.shape = {4, kLength, kLength, 5, 5, 8, 8};
      planned.mask = one.mask;
      planned.call_arguments = {draw(random, 0, 2) > 0, !one.mask.has_packings(), false};
      Mask& mask = one.mask;
      CallArgumentArrays called;
      if (planned.call_arguments.lengths) {
        mask.set_query_lengths(test::random_lengths(random, 4, kLength));
        mask.set_kv_lengths(test::random_lengths(random, 4, kLength));
        called.query_lengths = mask.query_lengths().data();
        called.kv_lengths = mask.kv_lengths().data();
      }
      std::vector<std::int32_t> offsets;
      for (int b = 0; b < 4; ++b) {
        offsets.push_back(static_cast<std::int32_t>(draw(random, -70, 70)));
      }
      offsets[static_cast<std::size_t>(draw(random, 0, 3))] = 2147483647;
      offsets[static_cast<std::size_t>(draw(random, 0, 3))] = -2147483647;
      if (planned.call_arguments.offsets) {
        if (mask.position_parts().limited()) mask.set_offsets(offsets);
        called.offsets = offsets.data();
      }
      SCOPED_TRACE("planned for " + to_string(planned.mask));
      const ListPlan plan(mask_of_calls(planned), one.of, one.rows, one.columns, one.tile_rows,
                          one.tile_columns);
      Walk(one, plan, make_lists(plan, called, one.of.first_batch)).expect_as_defined();
      if (HasFailure()) return;
    }
  }
}

bool any_hides_values(const HostLists& lists) {
  return std::any_of(lists.segments.begin(), lists.segments.end(), [](const KeySegment& segment) {
    return (segment.flags & KeySegment::kHidesValues) != 0;
  });
}

std::int64_t key_tiles(const HostLists& lists) {
  std::int64_t tiles = 0;
  for (const QueryTile& tile : lists.tiles) tiles += tile.key_tiles;
  return tiles;
}

TEST(FlashLists, OfBlocksOfWholeTilesNeedNoMask) {
  Random random(45);
  constexpr std::int64_t kBlocks = 7;
  std::vector<std::uint8_t> entries(2 * kBlocks * kBlocks);
  for (std::uint8_t& entry : entries) entry = draw(random, 0, 1) == 0 ? 1 : 0;
  std::int64_t visible = 0;
  for (const std::uint8_t entry : entries) visible += entry;
  ListCase one{
      {}, {0, 1, 0, 2}, PositionRanges::all(kBlocks * 16), PositionRanges::all(kBlocks * 18)};
  one.mask.set_block_mask(BlockMask({2, kBlocks, kBlocks}, {16, 18}, entries));
  const HostLists lists = lists_of(one);
  EXPECT_EQ(one.plan().heads(), 2);
  EXPECT_EQ(one.plan().tiles_per_list(), 2 * kBlocks);
  EXPECT_EQ(key_tiles(lists), visible * 2 * 3);
  for (const KeySegment& segment : lists.segments) EXPECT_EQ(segment.flags, 0);
}

// A causal mask beside blocks of whole tiles masks the tiles at the diagonal, and no others.
TEST(FlashLists, OfBlocksUnderABandMaskTheTilesAtItsEdge) {
  const PositionRanges all = PositionRanges::all(96);
  ListCase one{{}, {}, all, all, 6, 6};
  one.mask.set_causal(true);
  one.mask.set_block_mask(BlockMask::strided(96, 96, 1, 2, {6, 6}));
  const HostLists lists = lists_of(one);
  EXPECT_EQ(key_tiles(lists), 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8));
  for (const QueryTile& tile : lists.tiles) {
    EXPECT_EQ(tile.segments, tile.key_tiles);
    for (std::int32_t s = 0; s < tile.segments; ++s) {
      const KeySegment& segment = lists.segments[static_cast<std::size_t>(tile.first_segment + s)];
      EXPECT_EQ(segment.tiles, 1);
      EXPECT_EQ((segment.flags & KeySegment::kMasked) != 0, segment.first_column == tile.first_row);
    }
  }
}

TEST(FlashLists, OfFullAttentionMaskOnlyARaggedTile) {
  const auto list_all = [](std::int64_t columns) {
    return lists_of({{}, {}, PositionRanges::all(64), PositionRanges::all(columns)});
  };
  const HostLists even = list_all(60);
  EXPECT_EQ(even.tiles.size(), 8U);
  EXPECT_EQ(key_tiles(even), 80);
  for (const KeySegment& segment : even.segments) EXPECT_EQ(segment.flags, 0);

  const HostLists ragged = list_all(61);
  EXPECT_EQ(key_tiles(ragged), 88);
  EXPECT_FALSE(any_hides_values(ragged));  // zeros lie behind the last key
  for (const QueryTile& tile : ragged.tiles) {
    ASSERT_EQ(tile.segments, 2);
    const KeySegment& last = ragged.segments[static_cast<std::size_t>(tile.first_segment)];
    EXPECT_EQ(last.first_column, 60);
    EXPECT_EQ(last.columns, 1);
    EXPECT_EQ(last.tiles, 1);
  }
}

TEST(FlashLists, MaskOnlyTheEdgesOfABand) {
  const PositionRanges all = PositionRanges::all(96);
  ListCase one{{}, {}, all, all, 6, 6};
  one.mask.set_causal(true);
  one.mask.set_window(24, -1);
  const HostLists lists = lists_of(one);
  for (const QueryTile& tile : lists.tiles) {
    if (tile.first_row < 24) continue;
    ASSERT_EQ(tile.segments, 3);
    EXPECT_EQ(tile.key_tiles, 5);
    EXPECT_EQ(lists.segments[static_cast<std::size_t>(tile.first_segment) + 1].tiles, 3);
  }
  EXPECT_TRUE(any_hides_values(lists));
}

TEST(FlashLists, OfABatchThatSeesNothingAreEmpty) {
  const PositionRanges all = PositionRanges::all(30);
  ListCase one{{}, {0, 2, 0, 1}, all, all};
  one.mask.set_kv_lengths({0, 30});
  const HostLists lists = lists_of(one);
  ASSERT_EQ(one.plan().batches(), 2);
  EXPECT_EQ(one.plan().tiles_per_list(), 4);
  EXPECT_EQ(lists.tiles[0].segments, 0);
  EXPECT_EQ(lists.tiles[4].key_tiles, 5);
}

TEST(FlashLists, SayWhenNothingHidesValues) {
  const PositionRanges all = PositionRanges::all(60);
  ListCase one{{}, {0, 1, 0, 1}, all, all};
  EXPECT_FALSE(one.plan().may_hide_values());
  one.mask.set_block_mask(BlockMask::random(60, 60, 1, 0.5, 1, {6, 12}));
  EXPECT_FALSE(one.plan().may_hide_values());
  EXPECT_EQ(one.plan().asked(), Asked::nothing);
  one.mask.set_block_mask(BlockMask::random(60, 60, 1, 0.5, 1, {6, 10}));
  EXPECT_TRUE(one.plan().may_hide_values());
}

// Ids are needed only if the rows of a tile differ in them.
TEST(FlashLists, OfDocumentsThatEndBetweenTilesAskNothing) {
  const auto asked = [](std::vector<std::int32_t> cu_seqlens) {
    const std::vector<std::int32_t> ids = segments_from_cu_seqlens(cu_seqlens, 64);
    ListCase one{{}, {}, PositionRanges::all(64), PositionRanges::all(64)};
    one.mask.set_segments(1, ids, ids);
    return one.plan().asked();
  };
  EXPECT_EQ(asked({0, 16, 48, 64}), Asked::nothing);
  EXPECT_EQ(asked({0, 17, 48, 64}), Asked::documents);
}

}  // namespace
}  // namespace annulus::flash
