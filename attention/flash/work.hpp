#pragma once

#include <cstdint>

namespace annulus::flash {

// The work of a call: plain data that host and kernel read.

/// Neighbouring key tiles that a query tile meets. They are walked from the last to the first.
struct KeySegment {
  std::int32_t first_column = 0;  ///< local index of the first column of the first tile
  std::int32_t tiles = 0;
  std::int32_t flags = 0;
  std::int32_t columns = 0;  ///< only the last tile may have fewer than its width
  std::int32_t start = 0;    ///< global position of the first column
  std::int32_t stride = 1;   ///< of positions, from column to column
  /// For masked tiles: row r of the query tile sees column c of the segment iff
  /// low + row_stride · r ≤ stride · c ≤ high + row_stride · r, column c is among the RowKeys of
  /// the row and their ids agree, where there are any. `low` and `high` lie within ±kFar.
  std::int32_t low = 0;
  std::int32_t high = 0;

  static constexpr std::int32_t kMasked = 1;  ///< pairs must be tested; otherwise all are visible
  static constexpr std::int32_t kHidesValues =
      2;                                       ///< some row must not see some value of its tiles
  static constexpr std::int32_t kOpening = 4;  ///< rows see RowKeys::opening of it, not ::rest
  static constexpr std::int32_t kFar = 1 << 29;
};

/// Some rows of the block, neighbours in memory and in steps of row_stride in position.
struct QueryTile {
  std::int32_t first_row = 0;
  std::int32_t rows = 0;       ///< at most the kernel's tile
  std::int32_t live_rows = 0;  ///< later rows of the tile see no key
  std::int32_t row_stride = 1;
  std::int32_t first_segment = 0;
  std::int32_t segments = 0;
  std::int32_t key_tiles = 0;
  std::int32_t start = 0;  ///< global position of the first row
};

/// The key positions [begin, end), such as a document's.
struct Document {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// The keys that positions and documents show to a row: two intervals without a common key. Prefix
/// and sink tokens are `opening`, unless they touch the others: then all are `rest`. A segment
/// asks for one of the two, so that every row sees an interval of its columns.
struct RowKeys {
  Document rest;
  Document opening;
};

}  // namespace annulus::flash
