#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/attention/mask.hpp>
#include <annulus/core/position.hpp>

namespace annulus {

/// A block's mask in local indices, for kernels that know only one diagonal band and one length per
/// batch: in batch i row r sees column c iff band.low ≤ c − r ≤ band.high,
/// r < row_lengths[i] and c < column_lengths[i]. A side of the band that hides nothing is
/// unlimited.
struct LocalMask {
  Band band;
  /// One per batch of the block; both empty if no batch is cut short. Both are 0 for a batch in
  /// which nothing is visible.
  std::vector<std::int32_t> row_lengths, column_lengths;
  /// Why the mask cannot be expressed in this way; empty if it is.
  std::string obstacle;

  /// True if batches have different lengths.
  [[nodiscard]] bool padded() const { return !row_lengths.empty(); }
};

/// The diagonal stays straight if rows and columns are each one run of positions with the same
/// stride. It also does if several runs continue it: in a rank's own block under a plain causal
/// mask and any layout, or with earlier columns that are all visible. Lengths and segments are
/// allowed if each batch keeps only the first rows and columns of the block, in one document. The
/// last rows do not count if a window leaves them no column.
[[nodiscard]] LocalMask local_mask(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                                   const PositionRanges& row_positions,
                                   const PositionRanges& column_positions);

}  // namespace annulus
