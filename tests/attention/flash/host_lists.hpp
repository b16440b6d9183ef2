#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "flash/lists/list_plan.hpp"
#include "flash/lists/tile_walk.hpp"

// The work lists that DeviceLists makes, made on the CPU by the same device functions.
namespace annulus::flash {

struct HostLists {
  std::vector<QueryTile> tiles;  ///< [batches][heads], in each list the longest first
  std::vector<KeySegment> segments;
  std::vector<RowKeys> row_keys;                  ///< [batches][rows], if the plan needs them
  std::vector<std::int32_t> row_ids, column_ids;  ///< likewise, and [batches][columns]
};

/// Runs the lanes of a warp one after the other: a first round records what each lane adds to a
/// sum, and a second round uses the sums.
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

inline void add_tile(const TileWalk& walk, HostLists& list) {
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
  // The first round writes to wrong places, so there is space for that. No result has the value
  // `unwritten`.
  KeySegment unwritten;
  unwritten.tiles = -1;
  std::vector<KeySegment> segments(static_cast<std::size_t>(2 * count.segments), unwritten);
  run_all([&](const Lanes& lanes) { write_segments(walk, lanes, segments.data()); });
  list.segments.insert(list.segments.end(), segments.begin(), segments.begin() + count.segments);
}

inline void add_asked(const ListPlan& plan, const ListInput& in, std::int32_t batch,
                      HostLists& list) {
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
inline HostLists make_lists(const ListPlan& plan, const CallArgumentArrays& called = {},
                            std::int64_t first_batch = 0) {
  const ListInput in =
      with_arguments(plan.input(plan.numbers().data(), plan.blocks().data()), called, first_batch);
  HostLists list;
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

}  // namespace annulus::flash
