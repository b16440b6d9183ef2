// The device functions that make work lists, run on the CPU and compared with the host's lists.
#include <algorithm>
#include <array>

#include "flash/lists/tile_walk.hpp"
#include "tests/attention/flash_list_cases.hpp"

namespace annulus::flash {
namespace {

using test::draw;
using test::ListCase;
using test::MaskKind;
using test::Random;

// Runs the lanes of a warp one after the other: a first round records what each lane adds to a sum,
// and a second round uses the sums.
class Lanes {
 public:
  static constexpr std::int32_t kCount = 4;
  using Notes = std::array<std::vector<std::int32_t>, kCount>;

  Lanes(std::int32_t lane, bool knows, Notes& notes) : lane_(lane), knows_(knows), notes_(notes) {}

  [[nodiscard]] std::int32_t lane() const { return lane_; }
  [[nodiscard]] std::int32_t sum(std::int32_t x) const {
    std::int32_t all = 0;
    (void)sum_before(x, all);
    return all;
  }
  std::int32_t sum_before(std::int32_t x, std::int32_t& all) const {
    all = 0;
    if (!knows_) {
      notes_[static_cast<std::size_t>(lane_)].push_back(x);
      return 0;
    }
    std::int32_t before = 0;
    for (std::int32_t lane = 0; lane < kCount; ++lane) {
      if (lane == lane_) before = all;
      all += notes_[static_cast<std::size_t>(lane)].at(next_);
    }
    ++next_;
    return before;
  }

 private:
  std::int32_t lane_;
  bool knows_;
  Notes& notes_;
  mutable std::size_t next_ = 0;
};

// Calls run(lanes) for every lane. All lanes must ask for the same number of sums.
template <class Run>
void run_all(const Run& run) {
  Lanes::Notes notes;
  for (const bool knows : {false, true}) {
    for (std::int32_t lane = 0; lane < Lanes::kCount; ++lane) run(Lanes(lane, knows, notes));
  }
  for (const std::vector<std::int32_t>& of_lane : notes) ASSERT_EQ(of_lane.size(), notes[0].size());
}

void add_tile(const TileWalk& walk, WorkList& list) {
  TileCount count;
  run_all([&](const Lanes& lanes) { count = count_tile(walk, lanes); });
  QueryTile tile;
  tile.first_row = walk.rows.first_row;
  tile.rows = walk.rows.rows;
  tile.start = walk.rows.start;
  tile.live_rows = walk.live_rows;
  tile.row_stride = walk.rows.stride;
  tile.first_segment = static_cast<std::int32_t>(list.segments.size());
  tile.segments = count.segments;
  tile.key_tiles = count.key_tiles;
  list.tiles.push_back(tile);
  // With space for what the first round writes to wrong places, and filled with a value that is no
  // result.
  KeySegment unwritten;
  unwritten.tiles = -1;
  std::vector<KeySegment> segments(static_cast<std::size_t>(2 * count.segments), unwritten);
  run_all([&](const Lanes& lanes) { write_segments(walk, lanes, segments.data()); });
  list.segments.insert(list.segments.end(), segments.begin(), segments.begin() + count.segments);
}

void add_asked(const ListPlan& plan, const ListInput& in, std::int32_t batch, WorkList& list) {
  for (std::int32_t t = 0; t < in.row_tile_count; ++t) {
    const RowTile& rows = in.row_tiles[t];
    for (std::int32_t r = 0; r < rows.rows; ++r) {
      const std::int32_t position = rows.start + r * rows.stride;
      if (plan.needs_row_keys()) list.row_keys.push_back(row_keys_at(in, batch, position));
      if (plan.asked() != Asked::ids) continue;
      const QueryRun* const run = query_run_at(in, batch, position);
      list.row_ids.push_back(run != nullptr ? run->id : -1);
    }
  }
  if (plan.asked() != Asked::ids) return;
  for (std::int32_t i = 0; i < in.column_range_count; ++i) {
    const ColumnRange& range = in.column_ranges[i];
    for (std::int32_t c = 0; c < range.columns; ++c) {
      const KeyRun* const run = key_run_at(in, batch, range.start + c * range.stride);
      list.column_ids.push_back(run != nullptr ? run->id : -1);
    }
  }
}

// Does what the kernels do.
WorkList make_lists(const ListPlan& plan, const CallArgumentArrays& called = {},
                    std::int64_t first_batch = 0) {
  const ListInput in =
      with_arguments(plan.input(plan.numbers().data(), plan.blocks().data()), called, first_batch);
  WorkList list;
  for (std::int32_t b = 0; b < in.batches; ++b) {
    for (std::int32_t h = 0; h < in.heads; ++h) {
      const auto first = static_cast<std::ptrdiff_t>(list.tiles.size());
      for (std::int32_t t = 0; t < in.row_tile_count; ++t) add_tile(TileWalk(in, b, h, t), list);
      std::stable_sort(
          list.tiles.begin() + first, list.tiles.end(),
          [](const QueryTile& x, const QueryTile& y) { return x.key_tiles > y.key_tiles; });
    }
    add_asked(plan, in, b, list);
  }
  return list;
}

void expect_as_on_host(const ListCase& one) {
  SCOPED_TRACE(to_string(one));
  test::expect_same_lists(one, make_lists(one.plan()));
}

TEST(FlashLists, AreThoseOfTheHost) {
  for (const int seed : {51, 61}) {
    Random random(seed);
    for (const std::vector<MaskKind>& kinds : test::all_combinations()) {
      for (int repeat = 0; repeat < 30; ++repeat) {
        expect_as_on_host(test::random_list_case(random, kinds, 60, 8, 6));
        if (HasFailure()) return;
      }
    }
  }
}

// The keys of a run of queries are found whatever ids precede it.
TEST(FlashLists, IdsMayFall) {
  ListCase one;
  one.mask.set_segments(1, {3, 3, 1, 1, 2, 2, 0, 0}, {0, 0, 0, 1, 1, 1, 2, 2});
  one.of = {0, 1, 0, 1};
  one.rows = one.columns = PositionRanges::all(8);
  one.tile_rows = 4;
  one.tile_columns = 2;
  expect_as_on_host(one);
}

// Blocks of whole tiles, which need fewer segments, in rows of more than one word.
TEST(FlashLists, OfWholeBlocksAreThoseOfTheHost) {
  Random random(52);
  const std::vector<std::vector<MaskKind>> all = test::all_combinations();
  for (int repeat = 0; repeat < 300; ++repeat) {
    const auto kinds = static_cast<std::size_t>(draw(random, 0, std::ssize(all) - 1));
    ListCase one = test::random_list_case(random, all[kinds], 600, 12, 6);
    one.mask.set_block_mask(
        BlockMask::random(600, 600, 5, 0.1 * static_cast<double>(draw(random, 0, 10)),
                          static_cast<std::uint64_t>(repeat), {draw(random, 1, 3) * 12, 6}));
    expect_as_on_host(one);
    if (HasFailure()) return;
  }
}

// Bands far beyond the sequence, and blocks larger than it.
TEST(FlashLists, OfFarDistancesAreThoseOfTheHost) {
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
          expect_as_on_host(one);
          std::swap(one.rows, one.columns);
          one.mask.set_block_mask(BlockMask({1, 1}, {std::int64_t{1} << 40, std::int64_t{1} << 40},
                                            std::vector<std::uint8_t>{1}));
          expect_as_on_host(one);
        }
      }
    }
  }
}

// A plan made for other lengths and offsets, or for none, has room for those of every call.
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
      SCOPED_TRACE(to_string(one) + ", planned for " + to_string(planned.mask));
      const ListPlan plan(mask_of_calls(planned), one.of, one.rows, one.columns, one.tile_rows,
                          one.tile_columns);
      const WorkList made = make_lists(plan, called, one.of.first_batch);
      ASSERT_LE(std::ssize(made.segments), plan.most_segments());
      test::expect_same_lists(one, made);
      if (HasFailure()) return;
    }
  }
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
