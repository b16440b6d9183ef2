#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/local_mask.hpp>

namespace annulus {
namespace {

constexpr std::int64_t kUnlimited = Band::kUnlimited;

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

// Positions with a common stride that lie side by side in a block, from local index `first` on.
struct Run {
  PositionRange range;
  std::int64_t first = 0;

  [[nodiscard]] std::int64_t last() const { return first + range.length - 1; }
};

// Neighbouring ranges that go on where the last one ended, joined.
std::vector<Run> runs_of(const PositionRanges& positions) {
  std::vector<Run> runs;
  std::int64_t first = 0;
  for (const PositionRange& range : positions.ranges()) {
    const std::int64_t index = std::exchange(first, first + range.length);
    if (!runs.empty()) {
      PositionRange& last = runs.back().range;
      const std::int64_t step = range.start - last.last();
      const bool fits =
          (last.length == 1 || last.stride == step) && (range.length == 1 || range.stride == step);
      if (fits && step > 0) {
        last.stride = step;
        last.length += range.length;
        continue;
      }
    }
    runs.push_back({range, index});
  }
  return runs;
}

// The limit of to − from in local indices that says what `limit` says of their positions, if there
// is one. Where two runs meet, either all distances are below the limit, or none is, or the local
// limit is known.
std::optional<std::int64_t> local_limit(std::int64_t limit, const std::vector<Run>& from,
                                        const std::vector<Run>& to) {
  std::int64_t least = -kUnlimited;
  std::int64_t most = kUnlimited;
  for (const Run& f : from) {
    for (const Run& t : to) {
      if (t.range.last() - f.range.start <= limit) {
        least = std::max(least, t.last() - f.first);
      } else if (t.range.start - f.range.last() > limit) {
        most = std::min(most, t.first - f.last() - 1);
      } else if (f.range.length == 1 || t.range.length == 1 || f.range.stride == t.range.stride) {
        const std::int64_t stride = f.range.length == 1 ? t.range.stride : f.range.stride;
        const std::int64_t local =
            t.first - f.first + floor_divide(limit - (t.range.start - f.range.start), stride);
        least = std::max(least, local);
        most = std::min(most, local);
      } else {
        return std::nullopt;
      }
    }
  }
  return least <= most ? std::optional(most) : std::nullopt;
}

// What one batch shows apart from the band: that many rows, each of which sees that many columns,
// the first ones of the block.
struct Lengths {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// Null where it is no such rectangle.
std::optional<Lengths> lengths_of(const Mask& mask, std::int64_t batch,
                                  const std::vector<Run>& rows, const std::vector<Run>& columns) {
  Lengths lengths;
  std::int64_t pairs = 0;
  for (const Run& r : rows) {
    for (const Run& c : columns) {
      const Visibility seen = mask.examine_without_band(batch, r.range, c.range);
      if (seen.empty()) continue;
      if (!seen.exact) return std::nullopt;
      pairs += seen.pairs;
      lengths.rows = std::max(lengths.rows, r.first + seen.rows.end().value());
      lengths.columns = std::max(lengths.columns, c.first + seen.columns.end().value());
    }
  }
  if (pairs != lengths.rows * lengths.columns) return std::nullopt;
  return lengths;
}

LocalMask refusal(std::string obstacle) {
  LocalMask local;
  local.obstacle = std::move(obstacle);
  return local;
}

}  // namespace

LocalMask local_mask(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                     const PositionRanges& row_positions, const PositionRanges& column_positions) {
  const std::int64_t row_count = row_positions.size();
  const std::int64_t column_count = column_positions.size();
  if (row_count == 0 || column_count == 0 || batches == 0) return {};
  const std::vector<Run> rows = runs_of(row_positions);
  const std::vector<Run> columns = runs_of(column_positions);

  const Band global = mask.band();
  const std::optional<std::int64_t> high = local_limit(global.high, rows, columns);
  const std::optional<std::int64_t> low = local_limit(-global.low, columns, rows);
  if (!high || !low) {
    return refusal(
        fmt::format("rows {} against columns {} do not keep the mask's diagonal straight",
                    to_string(row_positions), to_string(column_positions)));
  }
  LocalMask local;
  local.band = {-*low, *high};
  if (!mask.depends_on_batch()) return local;

  bool cut = false;
  for (std::int64_t batch = first_batch; batch < first_batch + batches; ++batch) {
    std::optional<Lengths> lengths = lengths_of(mask, batch, rows, columns);
    if (!lengths) {
      return refusal(fmt::format(
          "segments or lengths leave batch {} more than the first rows and columns of one document",
          batch));
    }
    if (local.band.low != -kUnlimited) {
      lengths->rows = std::clamp<std::int64_t>(lengths->columns - local.band.low, 0, lengths->rows);
    }
    if (lengths->rows == 0 || lengths->columns == 0) lengths = Lengths{};
    cut = cut || lengths->rows < row_count || lengths->columns < column_count;
    local.row_lengths.push_back(static_cast<std::int32_t>(lengths->rows));
    local.column_lengths.push_back(static_cast<std::int32_t>(lengths->columns));
  }
  if (!cut) {
    local.row_lengths.clear();
    local.column_lengths.clear();
  }
  return local;
}

}  // namespace annulus
