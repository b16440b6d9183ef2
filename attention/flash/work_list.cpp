#include "flash/work_list.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "flash/lists/row_keys.hpp"

namespace annulus::flash {
namespace {

// Entries [begin, end) of a range of columns.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] bool empty() const { return begin >= end; }
};

Span common(const Span& a, const Span& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Neighbouring columns of a range with the same id.
struct IdRun {
  std::int32_t id;
  Span columns;
};

std::int32_t within_far(std::int64_t distance) {
  return static_cast<std::int32_t>(
      std::clamp<std::int64_t>(distance, -KeySegment::kFar, KeySegment::kFar));
}

// One range of columns, as one batch sees it.
struct ColumnRange {
  PositionRange positions;
  std::int64_t first = 0;   // local index of its first column
  std::int64_t length = 0;  // columns of it that the length of the batch leaves
  std::vector<IdRun> runs;  // by id, then by column; only if there are ids
};

class Lister {
 public:
  Lister(const Mask& mask, std::int64_t batch, std::int64_t head, const PositionRanges& columns,
         int tile_rows, int tile_columns, WorkList& list)
      : mask_(mask),
        band_(mask.one_band() ? mask.band() : Band{}),
        batch_(batch),
        head_(head),
        tile_rows_(tile_rows),
        tile_columns_(tile_columns),
        all_columns_(columns.size()),
        list_(list) {
    std::int64_t first = 0;
    for (const PositionRange& range : columns.ranges()) {
      ColumnRange column_range{range, first, range.length, {}};
      if (!mask.kv_lengths().empty()) {
        const std::int64_t limit = mask.kv_lengths()[static_cast<std::size_t>(batch)];
        column_range.length = range.count_below(GlobalPosition(limit));
      }
      if (mask.has_segments()) column_range.runs = runs_of(column_range);
      column_ranges_.push_back(std::move(column_range));
      first += range.length;
    }
  }

  void add_rows(const PositionRanges& rows) {
    const std::size_t begin = list_.tiles.size();
    const std::optional<BlockMask>& blocks = mask_.block_mask();
    std::int64_t first = 0;
    for (const PositionRange& range : rows.ranges()) {
      std::int64_t end = 0;
      for (std::int64_t row = 0; row < range.length; row = end) {
        end = std::min(row + tile_rows_, range.length);
        if (blocks) end = std::min(end, range.count_below(blocks->end_of_rows(range.at(row))));
        add_tile(range.slice(row, end - row), first + row);
      }
      first += range.length;
    }
    std::stable_sort(
        list_.tiles.begin() + static_cast<std::ptrdiff_t>(begin), list_.tiles.end(),
        [](const QueryTile& a, const QueryTile& b) { return a.key_tiles > b.key_tiles; });
  }

 private:
  [[nodiscard]] std::vector<IdRun> runs_of(const ColumnRange& range) const {
    const std::span<const std::int32_t> ids = mask_.kv_segments(batch_);
    std::vector<IdRun> runs;
    for (std::int64_t c = 0; c < range.length; ++c) {
      const std::int32_t id = ids[static_cast<std::size_t>(range.positions.at(c).value())];
      if (id < 0) continue;
      if (!runs.empty() && runs.back().id == id && runs.back().columns.end == c) {
        ++runs.back().columns.end;
      } else {
        runs.push_back({id, {c, c + 1}});
      }
    }
    std::stable_sort(runs.begin(), runs.end(),
                     [](const IdRun& a, const IdRun& b) { return a.id < b.id; });
    return runs;
  }

  void add_tile(const PositionRange& rows, std::int64_t first_row) {
    QueryTile tile;
    tile.first_row = static_cast<std::int32_t>(first_row);
    tile.rows = static_cast<std::int32_t>(rows.length);
    tile.start = static_cast<std::int32_t>(rows.start.value());
    tile.row_stride = static_cast<std::int32_t>(rows.stride);
    tile.first_segment = static_cast<std::int32_t>(list_.segments.size());
    PositionRange live = rows;
    if (!mask_.query_lengths().empty()) {
      const std::int64_t limit = mask_.query_lengths()[static_cast<std::size_t>(batch_)];
      live.length = rows.count_below(GlobalPosition(limit));
    }
    tile.live_rows = static_cast<std::int32_t>(live.length);
    if (live.length > 0) {
      for (auto range = column_ranges_.rbegin(); range != column_ranges_.rend(); ++range) {
        add_columns(tile, live, *range, false);
        if (!mask_.one_band()) add_columns(tile, live, *range, true);
      }
    }
    tile.segments = static_cast<std::int32_t>(list_.segments.size()) - tile.first_segment;
    list_.key_tiles += tile.key_tiles;
    list_.tiles.push_back(tile);
  }

  // Columns of which the band shows any, or all, to any, or all, of the rows.
  [[nodiscard]] Span seen_by_any(const PositionRange& rows, const ColumnRange& range) const {
    return within(range, rows.start, rows.last());
  }
  [[nodiscard]] Span seen_by_all(const PositionRange& rows, const ColumnRange& range) const {
    return within(range, rows.last(), rows.start);
  }
  // Columns from `low` before the one position to `high` behind the other.
  [[nodiscard]] Span within(const ColumnRange& range, GlobalPosition low,
                            GlobalPosition high) const {
    Span span{0, range.length};
    if (band_.low != -Band::kUnlimited) span.begin = range.positions.count_below(low + band_.low);
    if (band_.high != Band::kUnlimited) {
      span.end = std::min(span.end, range.positions.count_below(high + band_.high + 1));
    }
    return span;
  }

  // `opening`: those of RowKeys::opening, else the others.
  void add_columns(QueryTile& tile, const PositionRange& rows, const ColumnRange& range,
                   bool opening) {
    opening_ = opening;
    Span any{0, range.length};
    Span all{};
    const std::vector<std::int32_t> ids = ids_of(rows);
    if (mask_.one_band()) {
      any = seen_by_any(rows, range);
      all = seen_by_all(rows, range);
    } else if (!mask_.has_packings() || ids.size() == 1) {
      const KeyHull hull = hull_of(rows);
      any = columns_of(range, hull.any);
      all = columns_of(range, hull.all);
    }
    if (any.empty()) return;
    if (!mask_.block_mask()) return add_run(tile, rows, ids, range, any, all);
    const std::vector<Span> runs = runs_of_blocks(rows, range, any);
    for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
      add_run(tile, rows, ids, range, *run, common(*run, all));
    }
  }

  // Rows of one document.
  [[nodiscard]] KeyHull hull_of(const PositionRange& rows) const {
    return key_hull(mask_.position_rule(batch_, rows.start), rows.start.value(),
                    rows.last().value(), opening_);
  }
  [[nodiscard]] static Span columns_of(const ColumnRange& range, const Document& keys) {
    const auto below = [&](std::int32_t key) {
      return std::min(range.length, range.positions.count_below(GlobalPosition(key)));
    };
    return {below(keys.begin), below(keys.end)};
  }
  // The columns of a document of two packings that positions show to its rows.
  [[nodiscard]] Span seen_of(const PositionRange& rows, const ColumnRange& range,
                             std::int32_t document) const {
    const std::vector<std::int32_t>& ends = mask_.query_cu_seqlens();
    const auto d = static_cast<std::size_t>(document);
    const LocalRange own =
        rows.indices_within(GlobalPosition(ends[d]), GlobalPosition(ends[d + 1]));
    return columns_of(range, hull_of(rows.slice(own.begin.value(), own.count)).any);
  }

  // Visible blocks side by side; rows see the same ones.
  [[nodiscard]] std::vector<Span> runs_of_blocks(const PositionRange& rows,
                                                 const ColumnRange& range, const Span& any) const {
    std::vector<Span> runs;
    for (std::int64_t column = any.begin; column < any.end;) {
      const BlockMask::Run run =
          mask_.block_mask()->next_run(batch_, head_, rows.start, range.positions.at(column));
      if (run.empty()) break;
      const Span span{range.positions.count_below(run.begin),
                      std::min(any.end, range.positions.count_below(run.end))};
      if (!span.empty()) runs.push_back(span);  // a stride may step over a run
      column = std::max(span.begin, span.end);
    }
    return runs;
  }

  // Columns among which no block is hidden; the band shows them to any row, those of `all` to all.
  void add_run(QueryTile& tile, const PositionRange& rows, const std::vector<std::int32_t>& ids,
               const ColumnRange& range, const Span& any, const Span& all) {
    if (!mask_.has_segments()) return add_span(tile, rows, range, any, all);
    std::vector<Span> spans;  // what the ids of the rows leave
    for (const std::int32_t id : ids) {
      if (id < 0) continue;
      const auto [begin, end] =
          std::equal_range(range.runs.begin(), range.runs.end(), IdRun{id, {}},
                           [](const IdRun& a, const IdRun& b) { return a.id < b.id; });
      for (auto run = begin; run != end; ++run) {
        Span span = common(run->columns, any);
        if (mask_.has_packings() && !mask_.one_band()) {
          span = common(span, seen_of(rows, range, id));
        }
        if (!span.empty()) spans.push_back(span);
      }
    }
    const bool alike = ids.size() == 1;
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.begin < b.begin; });
    // Spans that would share a tile go together.
    std::vector<Span> joined;
    bool one_run = alike;
    for (const Span& span : spans) {
      if (!joined.empty() && span.begin < rounded_end(joined.back())) {
        joined.back().end = std::max(joined.back().end, span.end);
        one_run = false;
      } else {
        joined.push_back(span);
      }
    }
    for (auto span = joined.rbegin(); span != joined.rend(); ++span) {
      if (!one_run) list_.asks_ids = true;
      add_span(tile, rows, range, *span, one_run ? common(*span, all) : Span{});
    }
  }

  // Each of them once, in order; none without segments.
  [[nodiscard]] std::vector<std::int32_t> ids_of(const PositionRange& rows) const {
    if (!mask_.has_segments()) return {};
    const std::span<const std::int32_t> all = mask_.query_segments(batch_);
    std::vector<std::int32_t> ids;
    for (std::int64_t r = 0; r < rows.length; ++r) {
      const std::int32_t id = all[static_cast<std::size_t>(rows.at(r).value())];
      if (ids.empty() || ids.back() != id) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

  // Where the tiles of a span end.
  [[nodiscard]] std::int64_t rounded_end(const Span& span) const {
    return span.begin + (span.end - span.begin + tile_columns_ - 1) / tile_columns_ * tile_columns_;
  }

  // Key tiles from the first column that any row sees on; those inside `all` are full.
  void add_span(QueryTile& tile, const PositionRange& rows, const ColumnRange& range,
                const Span& any, const Span& all) {
    const std::int64_t tiles = (any.end - any.begin + tile_columns_ - 1) / tile_columns_;
    std::int64_t full_begin = tiles;
    std::int64_t full_end = tiles;
    if (!all.empty()) {
      full_begin = std::min(
          tiles, (std::max(all.begin, any.begin) - any.begin + tile_columns_ - 1) / tile_columns_);
      full_end = std::max(full_begin, (all.end - any.begin) / tile_columns_);
    }
    add_segment(tile, rows, range, any, all, full_end, tiles, true);
    add_segment(tile, rows, range, any, all, full_begin, full_end, false);
    add_segment(tile, rows, range, any, all, 0, full_begin, true);
  }

  // Tiles [begin, end) of a span.
  void add_segment(QueryTile& tile, const PositionRange& rows, const ColumnRange& range,
                   const Span& any, const Span& all, std::int64_t begin, std::int64_t end,
                   bool masked) {
    if (begin >= end) return;
    const std::int64_t first = any.begin + begin * tile_columns_;
    const std::int64_t behind = any.begin + end * tile_columns_;
    KeySegment segment;
    segment.first_column = static_cast<std::int32_t>(range.first + first);
    segment.tiles = static_cast<std::int32_t>(end - begin);
    const GlobalPosition start = range.positions.at(first);
    segment.start = static_cast<std::int32_t>(start.value());
    segment.stride = static_cast<std::int32_t>(range.positions.stride);
    segment.columns = static_cast<std::int32_t>(std::min(behind, any.end) - first);
    tile.key_tiles += segment.tiles;
    if (masked) {
      const std::int64_t distance = rows.start - start;
      segment.flags = KeySegment::kMasked | (opening_ ? KeySegment::kOpening : 0);
      segment.low =
          band_.low == -Band::kUnlimited ? -KeySegment::kFar : within_far(distance + band_.low);
      segment.high =
          band_.high == Band::kUnlimited ? KeySegment::kFar : within_far(distance + band_.high);
      // Columns behind the last one of the tensor arrive as zeros.
      const Span loaded{first, std::min(behind, all_columns_ - range.first)};
      if (all.empty() || all.begin > loaded.begin || all.end < loaded.end) {
        segment.flags |= KeySegment::kHidesValues;
        list_.hides_values = true;
      }
    }
    list_.segments.push_back(segment);
  }

  const Mask& mask_;
  Band band_;
  std::int64_t batch_;
  std::int64_t head_;
  std::int64_t tile_rows_;
  std::int64_t tile_columns_;
  std::int64_t all_columns_;
  bool opening_ = false;  // whether columns are listed for RowKeys::opening
  std::vector<ColumnRange> column_ranges_;
  WorkList& list_;
};

// The key positions of each id of a batch; none if those of some id are not neighbours.
std::optional<std::map<std::int32_t, Document>> documents_of(const Mask& mask, std::int64_t batch) {
  std::map<std::int32_t, Document> documents;
  const std::span<const std::int32_t> ids = mask.kv_segments(batch);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto position = static_cast<std::int32_t>(i);
    if (ids[i] < 0) continue;
    if (i > 0 && ids[i - 1] == ids[i]) {
      ++documents[ids[i]].end;
    } else if (!documents.try_emplace(ids[i], Document{position, position + 1}).second) {
      return std::nullopt;
    }
  }
  return documents;
}

template <class Visit>
void for_each(const PositionRanges& positions, const Visit& visit) {
  for (const PositionRange& range : positions.ranges()) {
    for (std::int64_t i = 0; i < range.length; ++i) {
      visit(static_cast<std::size_t>(range.at(i).value()));
    }
  }
}

// `documents`: of each id; null if row_keys are not to know them.
void add_row_keys(const Mask& mask, std::int64_t batch, const PositionRanges& rows,
                  const std::map<std::int32_t, Document>* documents, WorkList& list) {
  const std::span<const std::int32_t> ids = mask.query_segments(batch);
  for_each(rows, [&](std::size_t position) {
    RowKeys keys{{0, KeySegment::kFar}, {}};
    const auto row = static_cast<std::int64_t>(position);
    if (!mask.one_band()) keys = row_keys(mask.position_rule(batch, GlobalPosition(row)), row);
    if (documents != nullptr) {
      const auto found = documents->find(ids[position]);
      const Document own = found == documents->end() ? Document{} : found->second;
      keys = {common(keys.rest, own), common(keys.opening, own)};
    }
    list.row_keys.push_back(keys);
  });
}

void add_ids(const Mask& mask, std::int64_t batch, const PositionRanges& rows,
             const PositionRanges& columns, WorkList& list) {
  for_each(rows, [&](std::size_t position) {
    list.row_ids.push_back(mask.query_segments(batch)[position]);
  });
  for_each(columns, [&](std::size_t position) {
    list.column_ids.push_back(mask.kv_segments(batch)[position]);
  });
}

}  // namespace

WorkList list_work(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& rows,
                   const PositionRanges& columns, int tile_rows, int tile_columns) {
  WorkList list;
  list.batches = mask.depends_on_batch() ? of.batches : 1;
  list.heads = mask.depends_on_head() ? of.heads : 1;
  for (std::int64_t b = 0; b < list.batches; ++b) {
    for (std::int64_t h = 0; h < list.heads; ++h) {
      Lister(mask, of.first_batch + b, of.first_head + h, columns, tile_rows, tile_columns, list)
          .add_rows(rows);
    }
  }
  const bool banded = mask.one_band();
  if (banded && !list.asks_ids) return list;
  std::vector<std::map<std::int32_t, Document>> documents;  // of each batch
  bool neighbours = mask.has_segments();
  for (std::int64_t b = 0; b < list.batches && neighbours; ++b) {
    auto of_batch = documents_of(mask, of.first_batch + b);
    neighbours = of_batch.has_value();
    if (of_batch) documents.push_back(std::move(*of_batch));
  }
  for (std::int64_t b = 0; b < list.batches; ++b) {
    if (neighbours || !banded) {
      add_row_keys(mask, of.first_batch + b, rows,
                   neighbours ? &documents[static_cast<std::size_t>(b)] : nullptr, list);
    }
    if (list.asks_ids && !neighbours) add_ids(mask, of.first_batch + b, rows, columns, list);
  }
  return list;
}

}  // namespace annulus::flash
