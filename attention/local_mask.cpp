#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/local_mask.hpp>

namespace annulus {
namespace {

constexpr std::int64_t kUnlimited = Band::kUnlimited;

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

// Neighbouring ranges that go on where the last one ended, joined.
std::vector<PositionRange> joined(const PositionRanges& positions) {
  std::vector<PositionRange> runs;
  for (const PositionRange& range : positions.ranges()) {
    if (!runs.empty()) {
      PositionRange& last = runs.back();
      const std::int64_t step = range.start - last.last();
      const bool fits =
          (last.length == 1 || last.stride == step) && (range.length == 1 || range.stride == step);
      if (fits && step > 0) {
        last.stride = step;
        last.length += range.length;
        continue;
      }
    }
    runs.push_back(range);
  }
  return runs;
}

bool ascending(const std::vector<PositionRange>& runs) {
  const auto out_of_order = [](const PositionRange& a, const PositionRange& b) {
    return a.last() >= b.start;
  };
  return std::adjacent_find(runs.begin(), runs.end(), out_of_order) == runs.end();
}

bool shows_everything(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                      const PositionRanges& rows, const PositionRanges& columns) {
  for (const PositionRange& some_rows : rows.ranges()) {
    for (const PositionRange& some_columns : columns.ranges()) {
      if (!mask.examine(first_batch, batches, some_rows, some_columns).full) return false;
    }
  }
  return true;
}

}  // namespace

LocalMask local_mask(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                     const PositionRanges& row_positions, const PositionRanges& column_positions) {
  const std::int64_t row_count = row_positions.size();
  const std::int64_t column_count = column_positions.size();
  if (row_count == 0 || column_count == 0 || batches == 0) return {};
  const auto shows_all = [&](const Mask& some) {
    return shows_everything(some, first_batch, batches, row_positions, column_positions);
  };
  if (shows_all(mask)) return {};
  if (mask.depends_on_batch()) {
    Mask without_band = mask;
    without_band.set_causal(false);
    without_band.set_window(-1, -1);
    if (!shows_all(without_band)) return {{}, "segments or lengths hide a part of the block"};
  }

  const Band global = mask.band();
  const std::vector<PositionRange> rows = joined(row_positions);
  const std::vector<PositionRange> columns = joined(column_positions);
  Band band;
  if (rows.size() == 1 && columns.size() == 1 &&
      (rows[0].length == 1 || columns[0].length == 1 || rows[0].stride == columns[0].stride)) {
    const std::int64_t stride = rows[0].length == 1 ? columns[0].stride : rows[0].stride;
    const std::int64_t distance = columns[0].start - rows[0].start;
    if (global.low != -kUnlimited) band.low = ceil_divide(global.low - distance, stride);
    if (global.high != kUnlimited) band.high = floor_divide(global.high - distance, stride);
  } else if (rows == columns && ascending(rows) && global.low == -kUnlimited && global.high == 0) {
    band.high = 0;
  } else {
    return {{},
            fmt::format("rows {} against columns {} do not keep the mask's diagonal straight",
                        to_string(row_positions), to_string(column_positions))};
  }
  if (band.low <= 1 - row_count) band.low = -kUnlimited;
  if (band.high >= column_count - 1) band.high = kUnlimited;
  return {band, ""};
}

}  // namespace annulus
