#include "flash/lists/list_plan.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <optional>

#include <annulus/core/division.hpp>

namespace annulus::flash {
namespace {

std::int32_t narrow(std::int64_t value) {
  return static_cast<std::int32_t>(value);
}

std::int32_t distance(std::int64_t value) {
  return narrow(std::clamp<std::int64_t>(value, -ListInput::kUnlimited, ListInput::kUnlimited));
}

// The stride of a dimension of a block mask; 0 if its single entry is broadcast.
std::int64_t step(std::int64_t entries, std::int64_t distance) {
  return entries == 1 ? 0 : distance;
}

std::int32_t block_size(std::int64_t entries, std::int64_t size) {
  return entries == 1 ? ListInput::kWhole : narrow(std::min<std::int64_t>(size, ListInput::kWhole));
}

// The values of the block's batches; empty if there are none.
std::vector<std::int32_t> values_of(const std::vector<std::int32_t>& all,
                                    const BatchesAndHeads& of) {
  if (all.empty()) return {};
  const auto first = all.begin() + of.first_batch;
  return {first, first + of.batches};
}

PositionRange positions_of(const RowTile& tile) {
  return {GlobalPosition(tile.start), tile.rows, tile.stride};
}

// The runs of ids that a query tile meets.
std::span<const SegmentRun> runs_of(const Mask& mask, std::int64_t batch, const RowTile& tile) {
  const PositionRange rows = positions_of(tile);
  return mask.query_runs(batch, rows.start, rows.last() + 1);
}

bool covers(const SegmentRun& run, const PositionRange& rows) {
  return run.begin <= rows.start && rows.last() < run.end;
}

// The number of runs of visible blocks in a row.
std::int64_t runs_in(std::span<const std::uint64_t> row) {
  std::int64_t runs = 0;
  std::uint64_t before = 0;  // the last bit of the word before
  for (const std::uint64_t word : row) {
    runs += std::popcount(word & ~(word << 1U | before));
    before = word >> 63U;
  }
  return runs;
}

}  // namespace

Mask mask_of_calls(const AttentionProblem& problem) {
  Mask mask = problem.mask;
  const AttentionShape& shape = problem.shape;
  const auto for_all = [&](std::int64_t number) {
    return std::vector(static_cast<std::size_t>(shape.batch), narrow(number));
  };
  if (problem.call_arguments.lengths) {
    if (mask.query_lengths().empty()) mask.set_query_lengths(for_all(shape.query_length));
    if (mask.kv_lengths().empty()) mask.set_kv_lengths(for_all(shape.kv_length));
  }
  const bool moves = problem.call_arguments.offsets && mask.position_parts().limited();
  if (moves && mask.offsets().empty()) mask.set_offsets(for_all(mask.offset()));
  return mask;
}

ListInput with_arguments(ListInput input, const CallArgumentArrays& called,
                         std::int64_t first_batch) {
  const auto replace = [&](const std::int32_t*& numbers, const std::int32_t* others) {
    if (numbers != nullptr && others != nullptr) numbers = others + first_batch;
  };
  replace(input.query_lengths, called.query_lengths);
  replace(input.kv_lengths, called.kv_lengths);
  replace(input.offsets, called.offsets);
  return input;
}

ListPlan::ListPlan(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& rows,
                   const PositionRanges& columns, int tile_rows, int tile_columns) {
  input_.batches = mask.depends_on_batch() ? narrow(of.batches) : 1;
  input_.heads = mask.depends_on_head() ? narrow(of.heads) : 1;
  input_.rows = narrow(rows.size());
  input_.columns = narrow(columns.size());
  input_.tile_columns = tile_columns;
  add_positions(mask, of);
  add_rows(mask, rows, tile_rows);
  add_columns(columns);
  query_lengths_at_ = add(values_of(mask.query_lengths(), of));
  kv_lengths_at_ = add(values_of(mask.kv_lengths(), of));
  if (mask.has_segments()) add_ids(mask, of);
  if (mask.block_mask()) add_blocks(*mask.block_mask(), of);
  count_segments(mask, of, columns);
  may_hide_values_ = finds_hidden_values(mask, columns);
}

template <class T>
ListPlan::Place ListPlan::add(const std::vector<T>& values) {
  static_assert(sizeof(T) % sizeof(std::int32_t) == 0 && alignof(T) == alignof(std::int32_t));
  if (values.empty()) return {};
  const Place place{numbers_.size()};
  const auto* const first = reinterpret_cast<const std::int32_t*>(values.data());
  numbers_.insert(numbers_.end(), first, first + values.size() * (sizeof(T) / sizeof(*first)));
  return place;
}

ListInput ListPlan::input(const std::int32_t* numbers, const std::uint64_t* blocks) const {
  const auto set = [&]<class T>(const T*& array, const Place& place) {
    if (place.first != Place::kNone) array = reinterpret_cast<const T*>(numbers + place.first);
  };
  ListInput input = input_;
  set(input.row_tiles, row_tiles_at_);
  set(input.column_ranges, column_ranges_at_);
  set(input.query_lengths, query_lengths_at_);
  set(input.kv_lengths, kv_lengths_at_);
  set(input.offsets, offsets_at_);
  set(input.prefixes, prefixes_at_);
  set(input.query_cu_seqlens, query_cu_seqlens_at_);
  set(input.kv_cu_seqlens, kv_cu_seqlens_at_);
  set(input.query_runs, query_runs_at_);
  set(input.key_runs, key_runs_at_);
  set(input.first_query_run, first_query_run_at_);
  set(input.first_key_run, first_key_run_at_);
  if (!blocks_.empty()) input.blocks = blocks;
  return input;
}

void ListPlan::add_positions(const Mask& mask, const BatchesAndHeads& of) {
  if (mask.one_band()) {
    const Band band = mask.band();
    input_.low = distance(band.low);
    input_.high = distance(band.high);
    return;
  }
  input_.by_rule = 1;
  input_.parts = mask.position_parts();
  input_.frame.offset = mask.offset();
  input_.frame.prefix = mask.prefix();
  input_.bottom_right = mask.alignment() == DocumentAlignment::bottom_right ? 1 : 0;
  offsets_at_ = add(values_of(mask.offsets(), of));
  prefixes_at_ = add(values_of(mask.prefixes(), of));
  query_cu_seqlens_at_ = add(mask.query_cu_seqlens());
  kv_cu_seqlens_at_ = add(mask.kv_cu_seqlens());
}

void ListPlan::add_rows(const Mask& mask, const PositionRanges& rows, int tile_rows) {
  const std::optional<BlockMask>& blocks = mask.block_mask();
  std::int64_t first = 0;
  for (const PositionRange& range : rows.ranges()) {
    std::int64_t end = 0;
    for (std::int64_t row = 0; row < range.length; row = end) {
      end = std::min(row + tile_rows, range.length);
      if (blocks) end = std::min(end, range.count_below(blocks->end_of_rows(range.at(row))));
      row_tiles_.push_back({narrow(first + row), narrow(end - row), narrow(range.at(row).value()),
                            narrow(range.stride)});
    }
    first += range.length;
  }
  input_.row_tile_count = narrow(static_cast<std::int64_t>(row_tiles_.size()));
  row_tiles_at_ = add(row_tiles_);
}

void ListPlan::add_columns(const PositionRanges& columns) {
  std::vector<ColumnRange> ranges;
  std::int64_t first = 0;
  for (const PositionRange& range : columns.ranges()) {
    ranges.push_back(
        {narrow(first), narrow(range.length), narrow(range.start.value()), narrow(range.stride)});
    first += range.length;
  }
  input_.column_range_count = narrow(static_cast<std::int64_t>(ranges.size()));
  column_ranges_at_ = add(ranges);
}

void ListPlan::add_ids(const Mask& mask, const BatchesAndHeads& of) {
  std::vector<QueryRun> query_runs;
  std::vector<KeyRun> key_runs;
  std::vector<std::int32_t> first_query_run{0};
  std::vector<std::int32_t> first_key_run{0};
  bool ascend = true;
  bool neighbours = true;  // the keys of every id
  bool alike = true;       // the rows of every tile
  const auto any_order = [](const auto& a, const auto& b) { return a.id >= b.id; };
  for (std::int64_t b = of.first_batch; b < of.first_batch + of.batches; ++b) {
    const std::span<const SegmentRun> keys = mask.kv_runs(b);  // by id
    neighbours =
        neighbours && std::adjacent_find(keys.begin(), keys.end(), any_order) == keys.end();
    for (const SegmentRun& run : keys) {
      key_runs.push_back({run.id, narrow(run.begin.value()), narrow(run.end.value())});
    }
    const auto first_key = key_runs.begin() + first_key_run.back();
    std::sort(first_key, key_runs.end(),
              [](const KeyRun& x, const KeyRun& y) { return x.begin < y.begin; });
    ascend = ascend && std::adjacent_find(first_key, key_runs.end(), any_order) == key_runs.end();

    const std::span<const SegmentRun> queries =
        mask.query_runs(b, GlobalPosition(0), GlobalPosition(ListInput::kWhole));
    ascend =
        ascend && std::adjacent_find(queries.begin(), queries.end(), any_order) == queries.end();
    auto key = keys.begin();
    for (const SegmentRun& run : queries) {
      if (key == keys.end() || key->id > run.id) key = keys.begin();
      key = std::lower_bound(key, keys.end(), run.id,
                             [](const SegmentRun& k, std::int32_t id) { return k.id < id; });
      Document document;
      if (key != keys.end() && key->id == run.id) {
        document = {narrow(key->begin.value()), narrow(key->end.value())};
      }
      query_runs.push_back({run.id, narrow(run.begin.value()), narrow(run.end.value()), document});
    }
    first_query_run.push_back(narrow(static_cast<std::int64_t>(query_runs.size())));
    first_key_run.push_back(narrow(static_cast<std::int64_t>(key_runs.size())));
    alike = alike && std::all_of(row_tiles_.begin(), row_tiles_.end(), [&](const RowTile& tile) {
              const std::span<const SegmentRun> runs = runs_of(mask, b, tile);
              return runs.empty() || (runs.size() == 1 && covers(runs[0], positions_of(tile)));
            });
  }
  if (!neighbours) {
    asked_ = Asked::ids;
  } else if (!alike) {
    asked_ = Asked::documents;
  }
  input_.ids_ascend = ascend ? 1 : 0;
  input_.neighbours = neighbours ? 1 : 0;
  // Adds an empty run, as there may be none: the kernel takes null arrays for a mask without ids.
  query_runs.emplace_back();
  key_runs.emplace_back();
  query_runs_at_ = add(query_runs);
  key_runs_at_ = add(key_runs);
  first_query_run_at_ = add(first_query_run);
  first_key_run_at_ = add(first_key_run);
}

void ListPlan::add_blocks(const BlockMask& blocks, const BatchesAndHeads& of) {
  const Extents& shape = blocks.shape();
  blocks_ = blocks.words();
  input_.head_rows = step(shape[1], shape[2]);
  input_.batch_rows = step(shape[0], shape[1] * shape[2]);
  input_.first_block_row = of.first_batch * input_.batch_rows + of.first_head * input_.head_rows;
  input_.words_per_row = narrow(blocks.words_per_row());
  input_.query_block = block_size(shape[2], blocks.size().query);
  input_.key_block = block_size(shape[3], blocks.size().kv);
}

// A span becomes up to three segments: masked at either end, full in the middle. A span of whole
// tiles that all rows see becomes one. Other spans lie only at the edges of the band, of its full
// part and of the range. There are never more segments than key tiles. All this holds for each of
// the two intervals of RowKeys.
void ListPlan::count_segments(const Mask& mask, const BatchesAndHeads& of,
                              const PositionRanges& columns) {
  constexpr std::int64_t kParts = 3;
  const std::int64_t edges = mask.position_parts().limited() ? 4 : 1;
  const std::int64_t intervals = 1 + input_.by_rule;
  struct Range {
    std::int64_t key_tiles;
    std::int64_t parts;  // segments of a run of blocks away from edges
  };
  std::vector<Range> ranges;
  for (const PositionRange& range : columns.ranges()) {
    const bool whole = input_.key_block % (range.stride * input_.tile_columns) == 0;
    ranges.push_back({ceil_divide(range.length, input_.tile_columns), whole ? 1 : 2});
  }
  // `runs`: of visible blocks. `ids`: into how many spans ids divide all columns.
  const auto most_of = [&](const Range& range, std::int64_t runs, std::int64_t ids) {
    const std::int64_t key_tiles = range.key_tiles + runs;
    std::int64_t most = kParts * runs;
    if (mask.has_segments()) {
      // If the keys of an id are not neighbours, there may be any number of spans.
      most = asked_ == Asked::ids ? key_tiles : kParts * (runs + ids);
    } else if (!blocks_.empty()) {
      most = std::min(most, runs * range.parts + 2 * edges);
    }
    return std::min(most, key_tiles);
  };
  for (std::int32_t b = 0; b < input_.batches; ++b) {
    for (const RowTile& tile : row_tiles_) {
      const std::int64_t ids =
          mask.has_segments() ? std::ssize(runs_of(mask, of.first_batch + b, tile)) : 0;
      for (std::int32_t h = 0; h < input_.heads; ++h) {
        std::int64_t runs = 1;
        if (!blocks_.empty()) {
          const std::int64_t row = input_.first_block_row + b * input_.batch_rows +
                                   h * input_.head_rows + tile.start / input_.query_block;
          runs = runs_in(blocks_.subspan(static_cast<std::size_t>(row * input_.words_per_row),
                                         static_cast<std::size_t>(input_.words_per_row)));
        }
        for (const Range& range : ranges) most_segments_ += intervals * most_of(range, runs, ids);
      }
    }
  }
}

// False if every segment is full or is cut only by the end of the tensor.
bool ListPlan::finds_hidden_values(const Mask& mask, const PositionRanges& columns) const {
  if (mask.position_parts().limited() || mask.has_segments() || !mask.kv_lengths().empty()) {
    return true;
  }
  const std::vector<PositionRange>& ranges = columns.ranges();
  return std::any_of(ranges.begin(), ranges.end(), [&](const PositionRange& range) {
    if (&range != &ranges.back() && range.length % input_.tile_columns != 0) return true;
    if (blocks_.empty() || input_.key_block == ListInput::kWhole) return false;
    return range.stride != 1 || range.start.value() % input_.key_block != 0 ||
           input_.key_block % input_.tile_columns != 0;
  });
}

}  // namespace annulus::flash
