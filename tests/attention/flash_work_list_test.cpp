// The tiles that the flash kernel is told to visit, against the mask's definition, pair by pair.
#include "tests/attention/flash_list_cases.hpp"

namespace annulus::flash {
namespace {

using test::draw;
using test::MaskKind;
using test::Random;

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kFirstHead = 1;
constexpr std::int64_t kHeads = 3;
constexpr int kTileRows = 8;
constexpr int kTileColumns = 6;

struct Block {
  PositionRanges rows;
  PositionRanges columns;
};

// The kernel's test of a pair in a masked tile.
bool shows(const KeySegment& segment, const QueryTile& tile, std::int64_t row,
           std::int64_t column) {
  const std::int64_t ahead = tile.row_stride * row;
  return column < segment.columns && segment.low + ahead <= segment.stride * column &&
         segment.stride * column <= segment.high + ahead;
}

class Walk {
 public:
  Walk(const Mask& mask, const Block& block)
      : mask_(mask),
        block_(block),
        list_(list_work(mask, {0, kBatch, kFirstHead, kHeads}, block.rows, block.columns, kTileRows,
                        kTileColumns)) {}

  [[nodiscard]] const WorkList& list() const { return list_; }

  // Every visible pair is met exactly once, and no other; no tile is in vain.
  void expect_as_defined() {
    const auto rows = static_cast<std::size_t>(block_.rows.size());
    const auto columns = static_cast<std::size_t>(block_.columns.size());
    for (std::int64_t list_of = 0; list_of < kBatch * kHeads; ++list_of) {
      const std::int64_t b = list_of / kHeads;
      const std::int64_t h = list_of % kHeads;
      met_.assign(rows * columns, 0);
      std::vector<int> row_met(rows, 0);
      const std::int64_t batch_list = list_.batches > 1 ? b : 0;
      const std::int64_t list = list_.heads > 1 ? batch_list * kHeads + h : batch_list;
      const auto first = static_cast<std::int32_t>(list * list_.tiles_per_list());
      for (std::int32_t t = 0; t < list_.tiles_per_list(); ++t) {
        const QueryTile& tile = list_.tiles[static_cast<std::size_t>(first + t)];
        if (t > 0) {
          EXPECT_LE(tile.key_tiles, list_.tiles[static_cast<std::size_t>(first + t - 1)].key_tiles);
        }
        for (int r = 0; r < tile.rows; ++r) ++row_met[static_cast<std::size_t>(tile.first_row + r)];
        visit(b, h, tile);
      }
      EXPECT_THAT(row_met, testing::Each(1));
      for (std::size_t i = 0; i < met_.size(); ++i) {
        ASSERT_EQ(met_[i], visible(b, h, std::int64_t(i / columns), std::int64_t(i % columns)))
            << to_string(mask_) << ", rows " << to_string(block_.rows) << ", columns "
            << to_string(block_.columns) << ", batch " << b << " head " << h << " pair "
            << i / columns << ", " << i % columns;
      }
    }
  }

 private:
  [[nodiscard]] bool visible(std::int64_t batch, std::int64_t head, std::int64_t row,
                             std::int64_t column) const {
    return mask_.visible(batch, kFirstHead + head, block_.rows.global(LocalPosition(row)),
                         block_.columns.global(LocalPosition(column)));
  }
  // As the kernel finds out.
  [[nodiscard]] bool keys_show(std::int64_t batch, const KeySegment& segment, std::int64_t row,
                               std::int64_t c) const {
    const std::int64_t list = list_.batches > 1 ? batch : 0;
    const auto row_at = static_cast<std::size_t>(list * block_.rows.size() + row);
    if (!list_.row_keys.empty()) {
      const RowKeys& keys = list_.row_keys[row_at];
      const bool opening = (segment.flags & KeySegment::kOpening) != 0;
      const Document& shown = opening ? keys.opening : keys.rest;
      const std::int64_t position = segment.start + c * segment.stride;
      if (position < shown.begin || position >= shown.end) return false;
    }
    if (!list_.row_ids.empty()) {
      const std::int64_t column = list * block_.columns.size() + segment.first_column + c;
      return list_.row_ids[row_at] >= 0 &&
             list_.row_ids[row_at] == list_.column_ids[static_cast<std::size_t>(column)];
    }
    return true;
  }

  void visit(std::int64_t batch, std::int64_t head, const QueryTile& tile) {
    std::int32_t key_tiles = 0;
    for (std::int32_t s = 0; s < tile.segments; ++s) {
      const KeySegment& segment = list_.segments[static_cast<std::size_t>(tile.first_segment + s)];
      key_tiles += segment.tiles;
      for (std::int32_t t = 0; t < segment.tiles; ++t) visit(batch, head, tile, segment, t);
    }
    EXPECT_EQ(key_tiles, tile.key_tiles);
  }

  void visit(std::int64_t batch, std::int64_t head, const QueryTile& tile,
             const KeySegment& segment, std::int32_t t) {
    int seen = 0;
    bool hidden = false;
    for (std::int64_t r = 0; r < tile.live_rows; ++r) {
      for (std::int64_t c = t * kTileColumns; c < (t + 1) * kTileColumns; ++c) {
        const std::int64_t row = tile.first_row + r;
        const std::int64_t column = segment.first_column + c;
        if ((segment.flags & KeySegment::kMasked) != 0 &&
            !(shows(segment, tile, r, c) && keys_show(batch, segment, row, c))) {
          hidden = hidden || column < block_.columns.size();
          continue;
        }
        ASSERT_LT(column, block_.columns.size());
        ++seen;
        ++met_[static_cast<std::size_t>(row * block_.columns.size() + column)];
        // No tile but those of visible blocks, whatever else is hidden of them.
        if (mask_.block_mask()) {
          ASSERT_TRUE(mask_.block_mask()->visible(batch, kFirstHead + head,
                                                  block_.rows.global(LocalPosition(row)),
                                                  block_.columns.global(LocalPosition(column))));
        }
      }
    }
    // Ids of a tile's rows may meet those of its columns only where positions hide them. What a
    // rule shows may lie between positions with strides.
    const bool strided = segment.stride != 1 || tile.row_stride != 1;
    if (!(mask_.has_segments() && mask_.position_parts().limited()) &&
        !(strided && !mask_.one_band())) {
      EXPECT_GT(seen, 0) << to_string(mask_) << ", rows " << to_string(block_.rows) << ", columns "
                         << to_string(block_.columns);
    }
    if (hidden) {
      EXPECT_NE(segment.flags & KeySegment::kHidesValues, 0);
    }
  }

  const Mask& mask_;
  const Block& block_;
  WorkList list_;
  std::vector<int> met_;
};

constexpr std::int64_t kLength = 60;

TEST(FlashWorkList, MeetsEveryVisiblePairOnce) {
  Random random(43);
  int full = 0;
  int several = 0;
  int documents = 0;
  int ids = 0;
  for (const std::vector<MaskKind>& kinds : test::all_combinations()) {
    for (int repeat = 0; repeat < 25; ++repeat) {
      const Mask mask = test::random_mask(random, kinds, kBatch, kLength, kLength);
      const PositionRanges rows = test::random_positions(random, kLength);
      const PositionRanges columns =
          draw(random, 0, 2) == 0 ? rows : test::random_positions(random, kLength);
      const Block block{rows, columns};
      Walk walk(mask, block);
      walk.expect_as_defined();
      for (const KeySegment& segment : walk.list().segments) {
        if ((segment.flags & KeySegment::kMasked) == 0) ++full;
      }
      for (const QueryTile& tile : walk.list().tiles) {
        if (tile.segments > 3) ++several;
      }
      if (!walk.list().row_keys.empty()) ++documents;
      if (!walk.list().row_ids.empty()) ++ids;
    }
  }
  EXPECT_GT(full, 1000);
  EXPECT_GT(several, 100);
  EXPECT_GT(documents, 100);
  EXPECT_GT(ids, 100);
}

TEST(FlashWorkList, MeetsEveryVisiblePairOfBlocksOnce) {
  Random random(44);
  int by_head = 0;
  int ids = 0;
  for (const std::vector<MaskKind>& kinds : test::all_combinations()) {
    for (int repeat = 0; repeat < 15; ++repeat) {
      Mask mask = test::random_mask(random, kinds, kBatch, kLength, kLength);
      mask.set_block_mask(test::random_block_mask(random, kBatch, kFirstHead + kHeads, kLength,
                                                  kLength, 3 * kTileColumns));
      const PositionRanges rows = test::random_positions(random, kLength);
      const PositionRanges columns =
          draw(random, 0, 2) == 0 ? rows : test::random_positions(random, kLength);
      const Block block{rows, columns};
      Walk walk(mask, block);
      walk.expect_as_defined();
      if (HasFailure()) return;
      if (walk.list().heads > 1) ++by_head;
      if (!walk.list().row_keys.empty() || !walk.list().row_ids.empty()) ++ids;
    }
  }
  EXPECT_GT(by_head, 100);
  EXPECT_GT(ids, 100);
}

TEST(FlashWorkList, BlocksOfWholeTilesNeedNoMask) {
  Random random(45);
  constexpr std::int64_t kBlocks = 7;
  std::vector<std::uint8_t> entries(2 * kBlocks * kBlocks);
  for (std::uint8_t& entry : entries) entry = draw(random, 0, 1) == 0 ? 1 : 0;
  std::int64_t visible = 0;
  for (const std::uint8_t entry : entries) visible += entry;
  Mask mask;
  mask.set_block_mask(BlockMask({2, kBlocks, kBlocks}, {2 * kTileRows, 3 * kTileColumns}, entries));
  const WorkList list =
      list_work(mask, {0, 1, 0, 2}, PositionRanges::all(kBlocks * 2 * kTileRows),
                PositionRanges::all(kBlocks * 3 * kTileColumns), kTileRows, kTileColumns);
  EXPECT_EQ(list.heads, 2);
  EXPECT_EQ(list.tiles_per_list(), 2 * kBlocks);
  EXPECT_EQ(list.key_tiles, visible * 2 * 3);
  EXPECT_FALSE(list.hides_values);
  for (const KeySegment& segment : list.segments) EXPECT_EQ(segment.flags, 0);
}

// A causal mask beside blocks of whole tiles masks the tiles at the diagonal, and no others.
TEST(FlashWorkList, BlocksUnderABandAreMaskedAtItsEdge) {
  Mask mask;
  mask.set_causal(true);
  mask.set_block_mask(BlockMask::strided(96, 96, 1, 2, {6, 6}));
  const PositionRanges all = PositionRanges::all(96);
  const WorkList list = list_work(mask, {}, all, all, 6, 6);
  EXPECT_EQ(list.key_tiles, 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8));
  for (const QueryTile& tile : list.tiles) {
    EXPECT_EQ(tile.segments, tile.key_tiles);
    for (std::int32_t s = 0; s < tile.segments; ++s) {
      const KeySegment& segment = list.segments[static_cast<std::size_t>(tile.first_segment + s)];
      EXPECT_EQ(segment.tiles, 1);
      EXPECT_EQ((segment.flags & KeySegment::kMasked) != 0, segment.first_column == tile.first_row);
    }
  }
}

WorkList list_all(std::int64_t rows, std::int64_t columns) {
  return list_work(Mask(), {}, PositionRanges::all(rows), PositionRanges::all(columns), kTileRows,
                   kTileColumns);
}

TEST(FlashWorkList, FullAttentionHasNoMaskedTileButARaggedOne) {
  const WorkList even = list_all(64, 60);
  EXPECT_EQ(even.tiles.size(), 8U);
  EXPECT_EQ(even.key_tiles, 80);
  EXPECT_FALSE(even.hides_values);
  for (const KeySegment& segment : even.segments) EXPECT_EQ(segment.flags, 0);

  const WorkList ragged = list_all(64, 61);
  EXPECT_EQ(ragged.key_tiles, 88);
  EXPECT_FALSE(ragged.hides_values);  // zeros lie behind the last key
  for (const QueryTile& tile : ragged.tiles) {
    ASSERT_EQ(tile.segments, 2);
    const KeySegment& last = ragged.segments[static_cast<std::size_t>(tile.first_segment)];
    EXPECT_EQ(last.first_column, 60);
    EXPECT_EQ(last.columns, 1);
    EXPECT_EQ(last.tiles, 1);
  }
}

TEST(FlashWorkList, MasksOnlyTheEdgesOfABand) {
  Mask mask;
  mask.set_causal(true);
  mask.set_window(24, -1);
  const PositionRanges all = PositionRanges::all(96);
  const WorkList list = list_work(mask, {}, all, all, 6, 6);
  for (const QueryTile& tile : list.tiles) {
    if (tile.first_row < 24) continue;
    ASSERT_EQ(tile.segments, 3);
    EXPECT_EQ(tile.key_tiles, 5);
    EXPECT_EQ(list.segments[static_cast<std::size_t>(tile.first_segment) + 1].tiles, 3);
  }
  EXPECT_TRUE(list.hides_values);
}

TEST(FlashWorkList, ABatchThatSeesNothingHasNoTiles) {
  Mask mask;
  mask.set_kv_lengths({0, 30});
  const PositionRanges all = PositionRanges::all(30);
  const WorkList list = list_work(mask, {0, 2, 0, 1}, all, all, kTileRows, kTileColumns);
  ASSERT_EQ(list.batches, 2);
  EXPECT_EQ(list.tiles_per_list(), 4);
  EXPECT_EQ(list.tiles[0].segments, 0);
  EXPECT_EQ(list.tiles[4].key_tiles, 5);
}

}  // namespace
}  // namespace annulus::flash
