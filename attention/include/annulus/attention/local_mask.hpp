#pragma once

#include <cstdint>
#include <string>

#include <annulus/attention/mask.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// A block's mask in local indices, for kernels that know nothing but one diagonal band: row r sees
/// column c iff band.low ≤ c − r ≤ band.high. A side of the band that hides nothing is unlimited.
struct LocalMask {
  Band band;
  /// Why no band says it; empty if `band` does.
  std::string obstacle;
};

/// A straight diagonal stays one where rows and columns are each one run of positions of the same
/// stride, and where both are the same ascending positions under a plain causal mask (a rank's own
/// block, under any layout). Lengths and segments are allowed where they hide nothing of the block.
[[nodiscard]] LocalMask local_mask(const Mask& mask, std::int64_t first_batch, std::int64_t batches,
                                   const PositionRanges& row_positions,
                                   const PositionRanges& column_positions);

}  // namespace annulus
