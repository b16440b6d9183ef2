#pragma once

#include "flash/lists/device.hpp"
#include "flash/lists/list_input.hpp"
#include "flash/lists/row_keys.hpp"

// The segments of one query tile, by interval arithmetic: see ListPlan for the tiles.
namespace annulus::flash {

/// Entries [begin, end) of a range of columns.
struct Columns {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  [[nodiscard]] ANNULUS_DEVICE bool empty() const { return begin >= end; }
};

ANNULUS_DEVICE Columns common(const Columns& a, const Columns& b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}

/// How many of the `count` positions start, start + stride, … lie below `bound`.
ANNULUS_DEVICE std::int32_t count_below(std::int32_t bound, std::int32_t start, std::int32_t stride,
                                        std::int32_t count) {
  if (bound <= start) return 0;
  const std::int32_t distance = bound - start - 1;
  return smaller(count, (stride == 1 ? distance : distance / stride) + 1);
}

/// The first of the runs, which are in order of position, that ends after `position`; else `end`.
template <class Run>
ANNULUS_DEVICE const Run* first_behind(const Run* begin, const Run* end, std::int32_t position) {
  while (begin != end) {
    const Run* const middle = begin + (end - begin) / 2;
    if (middle->end <= position) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

/// The run that holds the position; null if it is padding.
template <class Run>
ANNULUS_DEVICE const Run* run_at(const Run* begin, const Run* end, std::int32_t position) {
  const Run* const run = first_behind(begin, end, position);
  return run != end && run->begin <= position ? run : nullptr;
}
ANNULUS_DEVICE const QueryRun* query_run_at(const ListInput& in, std::int32_t batch,
                                            std::int32_t position) {
  return run_at(in.query_runs + in.first_query_run[batch],
                in.query_runs + in.first_query_run[batch + 1], position);
}
ANNULUS_DEVICE const KeyRun* key_run_at(const ListInput& in, std::int32_t batch,
                                        std::int32_t position) {
  return run_at(in.key_runs + in.first_key_run[batch], in.key_runs + in.first_key_run[batch + 1],
                position);
}

/// The rule of positions for the rows of a batch, or of one of its documents.
ANNULUS_DEVICE PositionRule rule_of(const ListInput& in, std::int32_t batch,
                                    std::int32_t document) {
  PositionFrame frame = in.frame;
  if (in.offsets != nullptr) frame.offset = in.offsets[batch];
  if (in.prefixes != nullptr) frame.prefix = in.prefixes[batch];
  if (in.query_cu_seqlens != nullptr) {
    frame = frame_of_document(in.query_cu_seqlens, in.kv_cu_seqlens, document, in.bottom_right != 0,
                              frame.prefix);
  }
  return in.parts.rule(frame);
}

/// The keys of the row at a position, its document included where the keys of ids are neighbours.
ANNULUS_DEVICE RowKeys row_keys_at(const ListInput& in, std::int32_t batch, std::int32_t position) {
  RowKeys keys{{0, KeySegment::kFar}, {}};
  const QueryRun* const run =
      in.query_runs != nullptr ? query_run_at(in, batch, position) : nullptr;
  if (in.by_rule != 0) {
    if (in.query_cu_seqlens != nullptr && run == nullptr) return {};
    keys = row_keys(rule_of(in, batch, run != nullptr ? run->id : 0), position);
  }
  if (in.query_runs == nullptr || in.neighbours == 0) return keys;
  const Document document = run != nullptr ? run->keys : Document{};
  return {common(keys.rest, document), common(keys.opening, document)};
}

/// A query tile of one batch and head, both counted from the block's first.
class TileWalk {
 public:
  ANNULUS_DEVICE TileWalk(const ListInput& input, std::int32_t of_batch, std::int32_t head,
                          std::int32_t tile)
      : in(input), batch(of_batch), rows(input.row_tiles[tile]), live_rows(rows.rows) {
    if (in.query_lengths != nullptr) live_rows = rows_below(in.query_lengths[batch]);
    if (in.blocks != nullptr) {
      const std::int64_t row = in.first_block_row + batch * in.batch_rows + head * in.head_rows +
                               rows.start / in.query_block;
      blocks = in.blocks + row * in.words_per_row;
    }
    if (in.query_runs != nullptr && live_rows > 0) find_runs();
  }

  const ListInput& in;
  std::int32_t batch;
  RowTile rows;
  std::int32_t live_rows;                 ///< later rows see nothing
  const std::uint64_t* blocks = nullptr;  ///< what the rows see; null: no block mask

  // Only with ids: the runs of queries that contain live rows, and a range of runs of keys outside
  // which no run has one of their ids.
  const QueryRun* first_run = nullptr;
  const QueryRun* last_run = nullptr;  ///< one past the last
  const KeyRun* first_key_run = nullptr;
  const KeyRun* last_key_run = nullptr;
  bool alike = true;  ///< all live rows have the same id

  [[nodiscard]] ANNULUS_DEVICE std::int32_t first_position() const { return rows.start; }
  [[nodiscard]] ANNULUS_DEVICE std::int32_t last_position() const {
    return rows.start + (live_rows - 1) * rows.stride;
  }
  [[nodiscard]] ANNULUS_DEVICE std::int32_t live_rows_in(const QueryRun& run) const {
    return smaller(live_rows, rows_below(run.end)) - smaller(live_rows, rows_below(run.begin));
  }
  /// The position of its first row.
  [[nodiscard]] ANNULUS_DEVICE std::int32_t first_in(const QueryRun& run) const {
    return rows.start + rows_below(run.begin) * rows.stride;
  }
  /// The part of the range that the length of the batch leaves.
  [[nodiscard]] ANNULUS_DEVICE ColumnRange columns(std::int32_t range) const {
    ColumnRange part = in.column_ranges[range];
    if (in.kv_lengths != nullptr) {
      part.columns = count_below(in.kv_lengths[batch], part.start, part.stride, part.columns);
    }
    return part;
  }

 private:
  [[nodiscard]] ANNULUS_DEVICE std::int32_t rows_below(std::int32_t bound) const {
    return count_below(bound, rows.start, rows.stride, rows.rows);
  }

  ANNULUS_DEVICE void find_runs() {
    const QueryRun* const end = in.query_runs + in.first_query_run[batch + 1];
    first_run = first_behind(in.query_runs + in.first_query_run[batch], end, first_position());
    std::int32_t id = -1;
    std::int32_t of_id = 0;
    for (last_run = first_run; last_run != end && last_run->begin <= last_position(); ++last_run) {
      const std::int32_t count = live_rows_in(*last_run);
      if (count > 0 && id < 0) id = last_run->id;
      if (last_run->id == id) of_id += count;
    }
    alike = of_id == live_rows;

    last_key_run = in.key_runs + in.first_key_run[batch + 1];
    first_key_run = in.key_runs + in.first_key_run[batch];
    if (in.ids_ascend == 0 || first_run == last_run) return;
    const KeyRun* behind = last_key_run;
    while (first_key_run != behind) {
      const KeyRun* const middle = first_key_run + (behind - first_key_run) / 2;
      if (middle->id < first_run->id) {
        first_key_run = middle + 1;
      } else {
        behind = middle;
      }
    }
  }
};

/// Neighbouring columns of a range that a tile's rows see, ids aside.
struct Piece {
  Columns any;
  std::int32_t segments = 0;
  std::int32_t key_tiles = 0;
  bool alike = true;  ///< ids hide nothing of the spans that they leave
};

/// A query tile beside one range of columns, and beside one of the two intervals of RowKeys: what
/// the rows see otherwise does not count here. Bands have no opening. The range has a candidate for
/// each key block; a piece begins at some of the candidates.
class RangeWalk {
 public:
  ANNULUS_DEVICE RangeWalk(const TileWalk& of, std::int32_t range, bool of_opening)
      : tile(of), in(of.in), columns(of.columns(range)), opening(of_opening) {
    if (in.by_rule == 0) {
      any = within(of.first_position(), of.last_position());
      all = within(of.last_position(), of.first_position());
    } else if (in.query_cu_seqlens == nullptr || of.alike) {
      const std::int32_t document = in.query_cu_seqlens != nullptr ? of.first_run->id : 0;
      const KeyHull hull = hull_of(document, of.first_position(), of.last_position());
      any = columns_of(hull.any);
      all = columns_of(hull.all);
    } else {
      any = {0, columns.columns};  // for_each_run() asks each document
    }
    if (any.empty()) return;
    candidates = 1;
    if (tile.blocks == nullptr) return;
    first_block = at(any.begin) / in.key_block;
    candidates = at(any.end - 1) / in.key_block - first_block + 1;
  }

  std::int32_t candidates = 0;

  /// The piece that begins at a candidate; empty if none does.
  [[nodiscard]] ANNULUS_DEVICE Piece piece(std::int32_t candidate) const {
    Piece piece{columns_from(candidate)};
    if (piece.any.empty()) return piece;
    std::int32_t spans = 0;
    piece.alike = for_each_span(piece.any, [&](const Columns& span) {
      const Cut cut = cut_of(span, common(span, all));
      piece.key_tiles += cut.tiles;
      piece.segments += cut.segments();
      ++spans;
    });
    if (!piece.alike) piece.segments = spans;  // each of them masked
    return piece;
  }

  /// Writes the segments of a piece, from the last columns to the first.
  ANNULUS_DEVICE void write(const Piece& piece, KeySegment* to) const {
    if (piece.segments == 0) return;
    KeySegment* end = to + piece.segments;
    for_each_span(piece.any, [&](const Columns& span) {
      const Columns seen_by_all = piece.alike ? common(span, all) : Columns{};
      const Cut cut = cut_of(span, seen_by_all);
      end -= cut.segments();
      KeySegment* next = end;
      const auto add = [&](std::int32_t begin, std::int32_t behind, bool masked) {
        if (begin < behind) *next++ = segment(span, seen_by_all, begin, behind, masked);
      };
      add(cut.full_end, cut.tiles, true);
      add(cut.full_begin, cut.full_end, false);
      add(0, cut.full_begin, true);
    });
  }

 private:
  /// The tiles of a span; the tiles [full_begin, full_end) need no mask.
  struct Cut {
    std::int32_t tiles;
    std::int32_t full_begin;
    std::int32_t full_end;
    [[nodiscard]] ANNULUS_DEVICE std::int32_t segments() const {
      return (full_begin > 0 ? 1 : 0) + (full_end > full_begin ? 1 : 0) +
             (tiles > full_end ? 1 : 0);
    }
  };

  [[nodiscard]] ANNULUS_DEVICE std::int32_t at(std::int32_t column) const {
    return columns.start + column * columns.stride;
  }
  [[nodiscard]] ANNULUS_DEVICE std::int32_t columns_below(std::int32_t bound) const {
    return count_below(bound, columns.start, columns.stride, columns.columns);
  }
  // Columns from the band's low edge at one position to its high edge at the other.
  [[nodiscard]] ANNULUS_DEVICE Columns within(std::int32_t low, std::int32_t high) const {
    return {columns_below(low + in.low), columns_below(high + in.high + 1)};
  }
  [[nodiscard]] ANNULUS_DEVICE Columns columns_of(const Document& keys) const {
    return {columns_below(keys.begin), columns_below(keys.end)};
  }
  [[nodiscard]] ANNULUS_DEVICE KeyHull hull_of(std::int32_t document, std::int32_t first_position,
                                               std::int32_t last_position) const {
    return key_hull(rule_of(in, tile.batch, document), first_position, last_position, opening);
  }
  // The columns of a document that positions show to its rows.
  [[nodiscard]] ANNULUS_DEVICE Columns seen_of(const QueryRun& document) const {
    const std::int32_t first = larger(tile.first_position(), tile.first_in(document));
    const std::int32_t rows = tile.live_rows_in(document);
    return columns_of(hull_of(document.id, first, first + (rows - 1) * tile.rows.stride).any);
  }
  [[nodiscard]] ANNULUS_DEVICE std::int32_t tiles_of(std::int32_t count) const {
    return (count + in.tile_columns - 1) / in.tile_columns;
  }
  [[nodiscard]] ANNULUS_DEVICE std::int32_t rounded_end(const Columns& span) const {
    return span.begin + tiles_of(span.end - span.begin) * in.tile_columns;
  }

  [[nodiscard]] ANNULUS_DEVICE bool is_visible(std::int32_t block) const {
    return (tile.blocks[block / 64] >> (block % 64) & 1) != 0;
  }
  // The first hidden block from `block` on, or one past the last candidate.
  [[nodiscard]] ANNULUS_DEVICE std::int32_t first_hidden(std::int32_t block) const {
    const std::int32_t end = first_block + candidates;
    while (block < end) {
      const std::uint64_t hidden = ~tile.blocks[block / 64] >> (block % 64);
      if (hidden != 0) return block + zeros_below(hidden);
      block = (block / 64 + 1) * 64;
    }
    return end;
  }

  // The columns of a run of visible blocks that begins at a candidate.
  [[nodiscard]] ANNULUS_DEVICE Columns columns_from(std::int32_t candidate) const {
    if (tile.blocks == nullptr) return any;
    const std::int32_t block = first_block + candidate;
    if (!is_visible(block) || (candidate > 0 && is_visible(block - 1))) return {};
    return common(any, {columns_below(block * in.key_block),
                        columns_below(first_hidden(block) * in.key_block)});
  }

  // Visits the spans of columns that ids leave visible, from the first to the last. Spans that
  // would share a tile are joined. Returns whether ids hide nothing of the spans.
  template <class Visit>
  ANNULUS_DEVICE bool for_each_span(const Columns& of, const Visit& visit) const {
    if (in.query_runs == nullptr) {
      visit(of);
      return true;
    }
    bool alike = tile.alike;
    Columns joined;
    const auto add = [&](const Columns& run) {
      const Columns span = common(run, of);
      if (span.empty()) return;
      if (!joined.empty() && span.begin < rounded_end(joined)) {
        joined.end = span.end;
        alike = false;
        return;
      }
      if (!joined.empty()) visit(joined);
      joined = span;
    };
    for_each_run(of, add);
    if (!joined.empty()) visit(joined);
    return alike;
  }

  // Visits runs of columns whose id some row has, from the first to the last. Runs outside `of` may
  // be left out.
  template <class Visit>
  ANNULUS_DEVICE void for_each_run(const Columns& of, const Visit& visit) const {
    const std::int32_t last = at(of.end - 1);
    const KeyRun* const end = tile.last_key_run;
    const QueryRun* row_run = tile.first_run;
    Columns run;
    std::int32_t id = -1;
    for (const KeyRun* key_run = first_behind(tile.first_key_run, end, at(of.begin));
         key_run != end && key_run->begin <= last; ++key_run) {
      if (!rows_have(key_run->id, row_run)) {
        if (row_run == tile.last_run) break;  // ids ascend
        continue;
      }
      Columns next{columns_below(key_run->begin), columns_below(key_run->end)};
      if (in.query_cu_seqlens != nullptr && in.by_rule != 0) next = common(next, seen_of(*row_run));
      if (next.empty()) continue;  // the stride skips it
      if (key_run->id == id && next.begin == run.end) {
        run.end = next.end;
        continue;
      }
      visit(run);
      run = next;
      id = key_run->id;
    }
    visit(run);
  }

  // If ids ascend, `from` follows them: it moves to the first run of rows whose id is not below
  // `id`.
  [[nodiscard]] ANNULUS_DEVICE bool rows_have(std::int32_t id, const QueryRun*& from) const {
    if (in.ids_ascend != 0) {
      while (from != tile.last_run && from->id < id) ++from;
      return from != tile.last_run && from->id == id && tile.live_rows_in(*from) > 0;
    }
    for (const QueryRun* run = tile.first_run; run != tile.last_run; ++run) {
      if (run->id == id && tile.live_rows_in(*run) > 0) return true;
    }
    return false;
  }

  // `seen_by_all`: the part of the span that all rows see.
  [[nodiscard]] ANNULUS_DEVICE Cut cut_of(const Columns& span, const Columns& seen_by_all) const {
    const std::int32_t tiles = tiles_of(span.end - span.begin);
    if (seen_by_all.empty()) return {tiles, tiles, tiles};
    const std::int32_t full_begin = smaller(tiles, tiles_of(seen_by_all.begin - span.begin));
    return {tiles, full_begin,
            larger(full_begin, (seen_by_all.end - span.begin) / in.tile_columns)};
  }

  // Tiles [begin, behind) of a span.
  [[nodiscard]] ANNULUS_DEVICE KeySegment segment(const Columns& span, const Columns& seen_by_all,
                                                  std::int32_t begin, std::int32_t behind,
                                                  bool masked) const {
    const auto within_far = [](std::int32_t distance) {
      return larger(-KeySegment::kFar, smaller(KeySegment::kFar, distance));
    };
    const std::int32_t first = span.begin + begin * in.tile_columns;
    const std::int32_t end = span.begin + behind * in.tile_columns;
    KeySegment segment;
    segment.first_column = columns.first_column + first;
    segment.tiles = behind - begin;
    segment.start = at(first);
    segment.stride = columns.stride;
    segment.columns = smaller(end, span.end) - first;
    if (!masked) return segment;
    segment.flags = KeySegment::kMasked | (opening ? KeySegment::kOpening : 0);
    const std::int32_t distance = tile.first_position() - segment.start;
    segment.low = within_far(distance + in.low);
    segment.high = within_far(distance + in.high);
    // Columns beyond the end of the tensor are loaded as zeros.
    const std::int32_t end_of_loaded = smaller(end, in.columns - columns.first_column);
    if (seen_by_all.empty() || seen_by_all.begin > first || seen_by_all.end < end_of_loaded) {
      segment.flags |= KeySegment::kHidesValues;
    }
    return segment;
  }

  const TileWalk& tile;
  const ListInput& in;
  ColumnRange columns;
  bool opening;
  Columns any, all;  // columns that positions show to any row, and to all
  std::int32_t first_block = 0;
};

/// The segments and key tiles of a query tile.
struct TileCount {
  std::int32_t segments = 0;
  std::int32_t key_tiles = 0;
};

/// The candidates are shared by Lanes::kCount lanes, of which `lanes` is number lane(). sum(x) adds
/// over all lanes, sum_before(x, all) over the lanes before this one.
template <class Lanes>
ANNULUS_DEVICE TileCount count_tile(const TileWalk& tile, const Lanes& lanes) {
  TileCount mine;
  const std::int32_t ranges = tile.live_rows > 0 ? tile.in.column_range_count : 0;
  for (std::int32_t r = 0; r < ranges; ++r) {
    for (std::int32_t opening = 0; opening <= tile.in.by_rule; ++opening) {
      const RangeWalk range(tile, r, opening != 0);
      for (std::int32_t i = lanes.lane(); i < range.candidates; i += Lanes::kCount) {
        const Piece piece = range.piece(i);
        mine.segments += piece.segments;
        mine.key_tiles += piece.key_tiles;
      }
    }
  }
  return {lanes.sum(mine.segments), lanes.sum(mine.key_tiles)};
}

/// Writes as many segments as count_tile() says.
template <class Lanes>
ANNULUS_DEVICE void write_segments(const TileWalk& tile, const Lanes& lanes, KeySegment* to) {
  const std::int32_t ranges = tile.live_rows > 0 ? tile.in.column_range_count : 0;
  for (std::int32_t r = ranges - 1; r >= 0; --r) {
    for (std::int32_t opening = 0; opening <= tile.in.by_rule; ++opening) {
      const RangeWalk range(tile, r, opening != 0);
      for (std::int32_t end = range.candidates; end > 0; end -= Lanes::kCount) {
        const std::int32_t candidate = end - 1 - lanes.lane();
        const Piece piece = candidate < 0 ? Piece{} : range.piece(candidate);
        std::int32_t all = 0;
        const std::int32_t before = lanes.sum_before(piece.segments, all);
        range.write(piece, to + before);
        to += all;
      }
    }
  }
}

}  // namespace annulus::flash
