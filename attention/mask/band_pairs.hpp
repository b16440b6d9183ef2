#pragma once

#include <cstdint>

#include <annulus/attention/mask.hpp>
#include <annulus/core/position.hpp>

namespace annulus {

/// How many (row, column) pairs of two ranges lie in a band. The cost is logarithmic in the strides
/// and independent of the lengths.
[[nodiscard]] std::int64_t band_pairs(const Band& band, const PositionRange& rows,
                                      const PositionRange& columns);

}  // namespace annulus
