#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/local_mask.hpp>

#include "mask/position_runs.hpp"

namespace annulus {
namespace {

constexpr std::int64_t kUnlimited = Band::kUnlimited;

// The visible part of one batch, apart from the band: the first `rows` rows of the block, each of
// which sees its first `columns` columns.
struct Lengths {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

// Null if it is not such a rectangle.
std::optional<Lengths> lengths_of(const Mask& mask, std::int64_t batch, const PositionRuns& rows,
                                  const PositionRuns& columns) {
  Lengths lengths;
  std::int64_t pairs = 0;
  for (const PositionRun& r : rows) {
    for (const PositionRun& c : columns) {
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
  if (mask.block_mask()) return refusal("it has a block mask");
  if (!mask.one_band()) return refusal("one band does not describe the visible positions");
  const PositionRuns rows = runs_of(row_positions);
  const PositionRuns columns = runs_of(column_positions);

  LocalBand band(mask.band());
  for (const PositionRun& r : rows) {
    for (const PositionRun& c : columns) band.add(r, c);
  }
  if (!band.straight()) {
    return refusal(
        fmt::format("rows {} against columns {} do not keep the mask's diagonal straight",
                    to_string(row_positions), to_string(column_positions)));
  }
  LocalMask local;
  local.band = band.band();
  if (!mask.depends_on_batch()) return local;

  bool cut = false;
  for (std::int64_t batch = first_batch; batch < first_batch + batches; ++batch) {
    std::optional<Lengths> lengths = lengths_of(mask, batch, rows, columns);
    if (!lengths) {
      return refusal(fmt::format(
          "in batch {} more is visible than the first rows and columns of one document", batch));
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
