#include "mask/visible_part.hpp"

#include <algorithm>
#include <span>

#include <annulus/core/division.hpp>

#include "mask/band_pairs.hpp"

namespace annulus {
namespace {

// Beyond this many chunks, what they show of a part is bounded instead of counted.
constexpr std::int64_t kMaxChunks = 1 << 16;

// The entries of `seen` from `low` behind one position to `high` behind the other.
LocalRange between(const PositionRange& seen, GlobalPosition from, std::int64_t low,
                   GlobalPosition to, std::int64_t high) {
  std::int64_t begin = 0;
  std::int64_t end = seen.length;
  if (low != -Band::kUnlimited) begin = seen.count_below(from + low);
  if (high != Band::kUnlimited) end = seen.count_below(to + high + 1);
  return {LocalPosition(begin), std::max<std::int64_t>(0, end - begin)};
}

// The entries of `seen` at a distance in [low, high] from some point of the hull of `from`.
LocalRange within_band(const PositionRange& seen, const PositionRange& from, std::int64_t low,
                       std::int64_t high) {
  return between(seen, from.start, low, from.last(), high);
}

// Adds what the band shows, in so many heads.
void add_rectangle(Visibility& total, const Band& band, std::int64_t heads,
                   const PositionRange& rows, std::int64_t first_row, const PositionRange& columns,
                   std::int64_t first_column) {
  if (rows.length == 0 || columns.length == 0 || heads == 0) return;
  const std::int64_t pairs = band_pairs(band, rows, columns);
  if (pairs == 0) return;
  total.pairs += heads * pairs;
  LocalRange seen = within_band(columns, rows, band.low, band.high);
  LocalRange seeing = within_band(rows, columns, -band.high, -band.low);
  seen.begin = seen.begin + first_column;
  seeing.begin = seeing.begin + first_row;
  total.columns = hull(total.columns, seen);
  total.rows = hull(total.rows, seeing);
}

// Key blocks [begin, end) of which each has as many columns, all in the tile, and which the band
// hides from no row; empty if there are none.
struct WholeBlocks {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

WholeBlocks whole_blocks(const Band& band, const PositionRange& rows, const PositionRange& columns,
                         std::int64_t block) {
  const LocalRange all = between(columns, rows.last(), band.low, rows.start, band.high);
  if (block % columns.stride != 0 || all.count == 0) return {};
  return {floor_divide(columns.at(all.begin.value() - 1).value(), block) + 1,
          columns.at(all.end().value()).value() / block};
}

// Rows of one query block.
void add_blocks(Visibility& total, const BandAndBlocks& seen, const PositionRange& rows,
                std::int64_t first_row, const PositionRange& columns, std::int64_t first_column) {
  const BlockMask& blocks = *seen.blocks;
  const std::int64_t block = blocks.keys_per_entry();
  const auto begin_of = [&](std::int64_t k) {
    return columns.count_below(GlobalPosition(k * block));
  };
  const std::span<const std::uint32_t> before = blocks.shown_before(seen.batch, rows.start);
  WholeBlocks whole;
  if (!seen.head) whole = whole_blocks(seen.band, rows, columns, block);
  const LocalRange near = within_band(columns, rows, seen.band.low, seen.band.high);
  const std::int64_t end = near.end().value();
  for (std::int64_t column = near.begin.value(), next = 0; column < end; column = next) {
    const std::int64_t k = columns.at(column).value() / block;
    const auto entry = before.begin() + k;
    if (k == whole.begin && k < whole.end) {
      next = begin_of(whole.end);
      const auto behind = before.begin() + whole.end;
      const std::int64_t shown = *behind - *entry;
      if (shown == 0) continue;
      total.pairs += shown * rows.length * (block / columns.stride);
      // The first and the last block of them that some head sees.
      const std::int64_t first = std::upper_bound(entry, behind, *entry) - before.begin() - 1;
      const std::int64_t last = std::lower_bound(entry, behind, *behind) - before.begin();
      const std::int64_t begin = begin_of(first);
      total.columns =
          hull(total.columns, {LocalPosition(first_column + begin), begin_of(last) - begin});
      total.rows = hull(total.rows, {LocalPosition(first_row), rows.length});
    } else {
      next = std::min(end, begin_of(k + 1));
      const std::int64_t heads = seen.head
                                     ? static_cast<std::int64_t>(blocks.visible(
                                           seen.batch, *seen.head, rows.start, columns.at(column)))
                                     : entry[1] - entry[0];
      add_rectangle(total, seen.band, heads, rows, first_row, columns.slice(column, next - column),
                    first_column + column);
    }
  }
}

}  // namespace

void add_part(Visibility& total, const BandAndBlocks& seen, const PositionRange& rows,
              std::int64_t first_row, const PositionRange& columns, std::int64_t first_column) {
  if (seen.blocks == nullptr) {
    return add_rectangle(total, seen.band, 1, rows, first_row, columns, first_column);
  }
  if (columns.length == 0) return;
  std::int64_t end = 0;
  for (std::int64_t row = 0; row < rows.length; row = end) {
    end = std::min(rows.length, rows.count_below(seen.blocks->end_of_rows(rows.at(row))));
    add_blocks(total, seen, rows.slice(row, end - row), first_row + row, columns, first_column);
  }
}

void add_rule(Visibility& total, const PositionRule& rule, BandAndBlocks seen,
              const PositionRange& rows, std::int64_t first_row, const PositionRange& columns,
              std::int64_t first_column) {
  if (rows.length == 0 || columns.length == 0) return;
  const auto add = [&](const Band& band, const LocalRange& of_rows, std::int64_t begin,
                       std::int64_t end) {
    if (of_rows.count == 0 || begin >= end) return;
    seen.band = band;
    add_part(total, seen, rows.slice(of_rows.begin.value(), of_rows.count),
             first_row + of_rows.begin.value(), columns.slice(begin, end - begin),
             first_column + begin);
  };
  const LocalRange all{LocalPosition(0), rows.length};
  const std::int64_t prefix = columns.count_below(GlobalPosition(rule.prefix_end));
  const std::int64_t opening = std::max(prefix, columns.count_below(GlobalPosition(rule.sink_end)));
  add({}, all, 0, prefix);
  add({-Band::kUnlimited, rule.causal}, all, prefix, opening);
  if (rule.chunk == 0) return add(rule.band, all, opening, columns.length);
  if (opening == columns.length) return;
  const std::int64_t first = std::max(rule.chunk_of_row(rows.start.value()),
                                      rule.chunk_of_key(columns.at(opening).value()));
  const std::int64_t last =
      std::min(rule.chunk_of_row(rows.last().value()), rule.chunk_of_key(columns.last().value()));
  if (last - first >= kMaxChunks) {
    Band near = rule.band;
    near.low = std::max(near.low, rule.offset - rule.chunk + 1);
    near.high = std::min(near.high, rule.offset + rule.chunk - 1);
    total.exact = false;
    return add(near, all, opening, columns.length);
  }
  for (std::int64_t chunk = first; chunk <= last; ++chunk) {
    const GlobalPosition begin(rule.origin + chunk * rule.chunk);
    const GlobalPosition end = begin + rule.chunk;
    add(rule.band, rows.indices_within(begin - rule.offset, end - rule.offset),
        std::max(opening, columns.count_below(begin)), columns.count_below(end));
  }
}

}  // namespace annulus
