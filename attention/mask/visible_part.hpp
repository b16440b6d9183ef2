#pragma once

#include <cstdint>
#include <optional>

#include <annulus/attention/mask.hpp>

namespace annulus {

/// The parts that hide pairs whose rows and columns agree in length and segment.
struct BandAndBlocks {
  Band band;
  const BlockMask* blocks = nullptr;  ///< null: none
  std::int64_t batch = 0;
  std::optional<std::int64_t> head = {};  ///< none: all heads of the block mask

  /// Heads of which pairs are counted.
  [[nodiscard]] std::int64_t heads() const {
    return blocks == nullptr || head ? 1 : blocks->heads();
  }
};

/// Adds what they show of a part of a tile: `rows` and `columns` start at these entries of it.
/// Pairs are summed over the heads; hulls cover all heads. Takes O(1) for every query block, and
/// for every key block that the band, the end of the columns or their stride cuts.
void add_part(Visibility& total, const BandAndBlocks& seen, const PositionRange& rows,
              std::int64_t first_row, const PositionRange& columns, std::int64_t first_column);

/// Adds what a rule shows beside blocks (seen.band is not used): the prefix, the sink tokens, and
/// the band, chunk by chunk. If the part touches too many chunks, adds an upper bound, and clears
/// total.exact.
void add_rule(Visibility& total, const PositionRule& rule, BandAndBlocks seen,
              const PositionRange& rows, std::int64_t first_row, const PositionRange& columns,
              std::int64_t first_column);

}  // namespace annulus
