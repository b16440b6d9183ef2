#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/straight_pieces.hpp>

#include "band_pairs.hpp"
#include "position_runs.hpp"

namespace annulus {
namespace {

using Runs = std::span<const PositionRun>;

PositionRanges positions_of(Runs runs) {
  std::vector<PositionRange> ranges;
  ranges.reserve(runs.size());
  for (const PositionRun& run : runs) ranges.push_back(run.range);
  return PositionRanges(std::move(ranges));
}

// Entries [begin, end) of runs that lie side by side, counted from the first of them.
PositionRuns slice(Runs runs, std::int64_t begin, std::int64_t end) {
  PositionRuns part;
  const std::int64_t origin = runs.front().first;
  for (const PositionRun& run : runs) {
    const std::int64_t from = std::max(begin + origin - run.first, std::int64_t{0});
    const std::int64_t to = std::min(end + origin - run.first, run.range.length);
    if (from < to) part.push_back(run.slice(from, to - from));
  }
  return part;
}

LocalRange extent(Runs runs) {
  return {LocalPosition(runs.front().first), runs.back().end() - runs.front().first};
}

// The runs in stretches that lie side by side.
std::vector<Runs> stretches(Runs runs) {
  std::vector<Runs> parts;
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= runs.size(); ++i) {
    if (i < runs.size() && runs[i].first == runs[i - 1].end()) continue;
    parts.push_back(runs.subspan(begin, i - begin));
    begin = i;
  }
  return parts;
}

// What a mask in local indices shows of a rectangle.
struct Seen {
  std::int64_t first_row = 0, end_row = 0;
  std::int64_t first_column = 0, end_column = 0;
  std::int64_t pairs = 0;
};

Seen seen_of(const LocalMask& mask, std::int64_t batches, std::int64_t rows, std::int64_t columns) {
  const Band& band = mask.band;
  Seen all;
  const std::size_t count = mask.padded() ? mask.row_lengths.size() : 1;
  for (std::size_t b = 0; b < count; ++b) {
    const std::int64_t r = mask.padded() ? mask.row_lengths[b] : rows;
    const std::int64_t c = mask.padded() ? mask.column_lengths[b] : columns;
    const std::int64_t pairs = band_pairs(band, {GlobalPosition(0), r}, {GlobalPosition(0), c});
    if (pairs == 0) continue;
    const bool below = band.high == Band::kUnlimited;
    const bool above = band.low == -Band::kUnlimited;
    const std::int64_t first_row = below ? 0 : std::max<std::int64_t>(0, -band.high);
    const std::int64_t end_row = above ? r : std::min(r, c - band.low);
    const std::int64_t first_column = above ? 0 : std::max<std::int64_t>(0, band.low);
    const std::int64_t end_column = below ? c : std::min(c, r + band.high);
    const bool first = all.pairs == 0;
    all.first_row = first ? first_row : std::min(all.first_row, first_row);
    all.first_column = first ? first_column : std::min(all.first_column, first_column);
    all.end_row = std::max(all.end_row, end_row);
    all.end_column = std::max(all.end_column, end_column);
    all.pairs += mask.padded() ? pairs : pairs * batches;
  }
  return all;
}

class Cutter {
 public:
  Cutter(const Mask& mask, std::int64_t first_batch, const PositionRanges& rows,
         const PositionRanges& columns, std::int64_t most)
      : mask_(mask),
        first_batch_(first_batch),
        rows_(runs_of(rows)),
        columns_(runs_of(columns)),
        most_(most) {
    for (std::size_t i = 0; i < columns_.size(); ++i) by_start_.push_back(i);
    std::sort(by_start_.begin(), by_start_.end(), [&](std::size_t a, std::size_t b) {
      return columns_[a].range.start < columns_[b].range.start;
    });
    GlobalPosition last(-1);
    for (const std::size_t i : by_start_) {
      reach_.push_back(last = std::max(last, columns_[i].range.last()));
    }
  }

  std::vector<StraightPiece> cut(std::int64_t batches) {
    if (!mask_.has_segments() || mask_of(rows_, columns_, 0, batches).obstacle.empty()) {
      cut_rectangle(rows_, columns_, 0, batches);
    } else {
      for (std::int64_t batch = 0; batch < batches && !too_many_; ++batch) cut_documents(batch);
    }
    if (too_many_) {
      StraightPiece piece = not_straight(rows_, columns_, 0, batches);
      piece.mask.obstacle = fmt::format("takes more than {} straight pieces", most_);
      return {piece};
    }
    std::sort(pieces_.begin(), pieces_.end(), [](const StraightPiece& a, const StraightPiece& b) {
      return std::tuple(a.first_batch, a.rows.begin, a.columns.begin) <
             std::tuple(b.first_batch, b.rows.begin, b.columns.begin);
    });
    return std::move(pieces_);
  }

 private:
  void cut_documents(std::int64_t batch) {
    struct Part {
      const SegmentRun* document;
      PositionRun rows;
    };
    std::vector<Part> parts;
    for (const PositionRun& run : rows_) {
      const auto documents =
          mask_.query_runs(first_batch_ + batch, run.range.start, run.range.last() + 1);
      for (const SegmentRun& document : documents) {
        const LocalRange within = run.range.indices_within(document.begin, document.end);
        if (within.count == 0) continue;
        parts.push_back({&document, run.slice(within.begin.value(), within.count)});
      }
    }
    std::stable_sort(parts.begin(), parts.end(),
                     [](const Part& a, const Part& b) { return a.document < b.document; });
    for (auto part = parts.begin(); part != parts.end() && !too_many_;) {
      const SegmentRun& document = *part->document;
      PositionRuns rows;
      for (; part != parts.end() && part->document == &document; ++part) {
        rows.push_back(part->rows);
      }
      const PositionRuns columns = columns_of(batch, document.id);
      for (const Runs r : stretches(rows)) {
        for (const Runs c : stretches(columns)) cut_rectangle(r, c, batch, 1);
      }
    }
  }

  // The columns of a document, in local order.
  [[nodiscard]] PositionRuns columns_of(std::int64_t batch, std::int32_t id) const {
    PositionRuns columns;
    for (const SegmentRun& document : mask_.kv_runs(first_batch_ + batch, id)) {
      const auto from = std::partition_point(reach_.begin(), reach_.end(),
                                             [&](GlobalPosition p) { return p < document.begin; }) -
                        reach_.begin();
      for (auto i = static_cast<std::size_t>(from); i < by_start_.size(); ++i) {
        const PositionRun& run = columns_[by_start_[i]];
        if (run.range.start >= document.end) break;
        const LocalRange within = run.range.indices_within(document.begin, document.end);
        if (within.count > 0) columns.push_back(run.slice(within.begin.value(), within.count));
      }
    }
    std::sort(columns.begin(), columns.end(),
              [](const PositionRun& a, const PositionRun& b) { return a.first < b.first; });
    return columns;
  }

  // Rows and columns lie side by side. One document at most, or none that matters.
  void cut_rectangle(Runs rows, Runs columns, std::int64_t batch, std::int64_t batches) {
    if (rows.empty() || columns.empty()) return;
    if (is_straight(rows, columns)) return add(rows, columns, batch, batches);

    // Row run by row run, as far along the columns as the diagonal goes on; then what the runs
    // above say of the same columns is joined, if it can be.
    struct Strip {
      Runs rows;
      Runs columns;
    };
    std::vector<Strip> strips;
    std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> by_columns;
    const auto close = [&](Runs row, Runs span) {
      const std::pair key(span.front().first, span.back().end());
      if (const auto above = by_columns.find(key); above != by_columns.end()) {
        Strip& strip = strips[above->second];
        const Runs joined(strip.rows.data(), strip.rows.size() + 1);
        if (&joined.back() == row.data() && is_straight(joined, span)) {
          strip.rows = joined;
          return;
        }
      }
      by_columns[key] = strips.size();
      strips.push_back({row, span});
    };
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Runs row = rows.subspan(r, 1);
      LocalBand band(mask_.band());
      std::size_t begin = 0;
      std::size_t end = 0;  // of those known to be visible
      for (std::size_t c = 0; c < columns.size(); ++c) {
        const bool visible = may_see(row.front(), columns[c]);
        if (end > begin) {
          LocalBand longer = band;
          longer.add(row.front(), columns[c]);
          if (longer.straight()) {
            band = longer;
            if (visible) end = c + 1;
            continue;
          }
          close(row, columns.subspan(begin, end - begin));
          end = begin;
        }
        if (!visible) continue;
        band = LocalBand(mask_.band());
        band.add(row.front(), columns[c]);
        begin = c;
        end = c + 1;
      }
      if (end > begin) close(row, columns.subspan(begin, end - begin));
    }
    for (const Strip& strip : strips) add(strip.rows, strip.columns, batch, batches);
  }

  [[nodiscard]] bool is_straight(Runs rows, Runs columns) const {
    LocalBand band(mask_.band());
    for (const PositionRun& r : rows) {
      for (const PositionRun& c : columns) band.add(r, c);
    }
    return band.straight();
  }

  // Whether the band reaches between their ends.
  [[nodiscard]] bool may_see(const PositionRun& rows, const PositionRun& columns) const {
    const Band band = mask_.band();
    return columns.range.last() - rows.range.start >= band.low &&
           columns.range.start - rows.range.last() <= band.high;
  }

  // Adds the part of a rectangle in which something is visible.
  void add(Runs rows, Runs columns, std::int64_t batch, std::int64_t batches) {
    LocalMask local = mask_of(rows, columns, batch, batches);
    if (!local.obstacle.empty()) {
      if (rows.size() == 1 && columns.size() == 1) {
        return add_crooked(rows.front(), columns.front(), batch, batches, std::move(local));
      }
      // Lengths that end in several runs.
      for (std::size_t r = 0; r < rows.size(); ++r) {
        for (std::size_t c = 0; c < columns.size(); ++c) {
          add(rows.subspan(r, 1), columns.subspan(c, 1), batch, batches);
        }
      }
      return;
    }
    LocalRange row_range = extent(rows);
    LocalRange column_range = extent(columns);
    const Seen seen = seen_of(local, batches, row_range.count, column_range.count);
    if (seen.pairs == 0) return;
    const std::int64_t row_count = seen.end_row - seen.first_row;
    const std::int64_t column_count = seen.end_column - seen.first_column;
    if (row_count < row_range.count || column_count < column_range.count) {
      const PositionRuns fewer_rows = slice(rows, seen.first_row, seen.end_row);
      const PositionRuns fewer_columns = slice(columns, seen.first_column, seen.end_column);
      row_range = extent(fewer_rows);
      column_range = extent(fewer_columns);
      local = mask_of(fewer_rows, fewer_columns, batch, batches);
    }
    keep({batch, batches, row_range, column_range, std::move(local), seen.pairs});
  }

  // Runs of different strides: all rows may see some columns in the middle. What is left beside
  // them, the diagonal's steps, no cut makes straight.
  void add_crooked(const PositionRun& rows, const PositionRun& columns, std::int64_t batch,
                   std::int64_t batches, LocalMask local) {
    const Band band = mask_.band();
    const std::int64_t all = columns.range.length;
    const std::int64_t begin =
        band.low == -Band::kUnlimited ? 0 : columns.range.count_below(rows.range.last() + band.low);
    const std::int64_t end = band.high == Band::kUnlimited
                                 ? all
                                 : columns.range.count_below(rows.range.start + band.high + 1);
    if (begin < end && end - begin < all) {
      const std::array parts{columns.slice(0, begin), columns.slice(begin, end - begin),
                             columns.slice(end, all - end)};
      for (const PositionRun& part : parts) {
        if (part.range.length > 0) add({&rows, 1}, {&part, 1}, batch, batches);
      }
      return;
    }
    const Visibility seen = mask_.examine(first_batch_ + batch, batches, rows.range, columns.range);
    if (seen.empty()) return;
    const PositionRun seeing = rows.slice(seen.rows.begin.value(), seen.rows.count);
    const PositionRun shown = columns.slice(seen.columns.begin.value(), seen.columns.count);
    if (seen.pairs == batches * seeing.range.length * shown.range.length) {
      return add({&seeing, 1}, {&shown, 1}, batch, batches);
    }
    keep({batch, batches, extent({&seeing, 1}), extent({&shown, 1}), std::move(local), seen.pairs});
  }

  void keep(StraightPiece piece) {
    if (joined_with_the_batch_before(piece)) return;
    too_many_ = too_many_ || static_cast<std::int64_t>(pieces_.size()) == most_;
    if (too_many_) return;
    latest_[key_of(piece)] = pieces_.size();
    pieces_.push_back(std::move(piece));
  }

  using Key = std::tuple<LocalPosition, std::int64_t, LocalPosition>;
  static Key key_of(const StraightPiece& piece) {
    return {piece.rows.begin, piece.rows.count, piece.columns.begin};
  }

  // The same rows, and columns that begin alike.
  bool joined_with_the_batch_before(const StraightPiece& piece) {
    const auto known = latest_.find(key_of(piece));
    if (known == latest_.end()) return false;
    StraightPiece& before = pieces_[known->second];
    if (before.first_batch + before.batches != piece.first_batch || !piece.mask.obstacle.empty() ||
        !before.mask.obstacle.empty()) {
      return false;
    }
    const LocalRange& longer =
        before.columns.count > piece.columns.count ? before.columns : piece.columns;
    const std::int64_t batches = before.batches + piece.batches;
    LocalMask both = mask_of(slice(rows_, piece.rows.begin.value(), piece.rows.end().value()),
                             slice(columns_, longer.begin.value(), longer.end().value()),
                             before.first_batch, batches);
    if (!both.obstacle.empty()) return false;
    before.batches = batches;
    before.columns = longer;
    before.mask = std::move(both);
    before.pairs += piece.pairs;
    return true;
  }

  [[nodiscard]] LocalMask mask_of(Runs rows, Runs columns, std::int64_t batch,
                                  std::int64_t batches) const {
    return local_mask(mask_, first_batch_ + batch, batches, positions_of(rows),
                      positions_of(columns));
  }

  [[nodiscard]] StraightPiece not_straight(Runs rows, Runs columns, std::int64_t batch,
                                           std::int64_t batches) const {
    StraightPiece piece{batch, batches, extent(rows), extent(columns), {}, 0};
    for (const PositionRun& r : rows) {
      for (const PositionRun& c : columns) {
        piece.pairs += mask_.examine(first_batch_ + batch, batches, r.range, c.range).pairs;
      }
    }
    return piece;
  }

  const Mask& mask_;
  const std::int64_t first_batch_;
  const PositionRuns rows_;
  const PositionRuns columns_;
  const std::int64_t most_;
  // Runs of columns in order of their first position, and how far those up to each reach.
  std::vector<std::size_t> by_start_;
  std::vector<GlobalPosition> reach_;
  std::vector<StraightPiece> pieces_;
  bool too_many_ = false;
  std::map<Key, std::size_t> latest_;
};

}  // namespace

std::vector<StraightPiece> straight_pieces(const Mask& mask, std::int64_t first_batch,
                                           std::int64_t batches, const PositionRanges& rows,
                                           const PositionRanges& columns, std::int64_t most) {
  if (rows.empty() || columns.empty() || batches == 0) return {};
  return Cutter(mask, first_batch, rows, columns, most).cut(batches);
}

}  // namespace annulus
