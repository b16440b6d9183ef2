#pragma once

#include <cstdint>

#include <annulus/attention/position_rule.hpp>

#include "flash/work.hpp"

// The input and output of the kernels that make lists: plain data that host and kernels read.
// Positions are global and below 2^28.
namespace annulus::flash {

/// The rows of a query tile: local rows from first_row on, at positions start, start + stride, …
struct RowTile {
  std::int32_t first_row = 0;
  std::int32_t rows = 0;
  std::int32_t start = 0;
  std::int32_t stride = 1;
};

/// A range of columns: local columns from first_column on, at positions start, start + stride, …
struct ColumnRange {
  std::int32_t first_column = 0;
  std::int32_t columns = 0;
  std::int32_t start = 0;
  std::int32_t stride = 1;
};

/// Neighbouring queries [begin, end) with the same id ≥ 0, and all keys with this id if the keys
/// are neighbours too.
struct QueryRun {
  std::int32_t id = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  Document keys;
};

/// Neighbouring keys with the same id ≥ 0.
struct KeyRun {
  std::int32_t id = 0;
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

struct ListInput {
  static constexpr std::int32_t kUnlimited = 1 << 30;  ///< distance, above KeySegment::kFar
  static constexpr std::int32_t kWhole = 1 << 29;      ///< block size, above every position

  std::int32_t batches = 1;  ///< batches with lists of their own
  std::int32_t heads = 1;    ///< likewise
  const RowTile* row_tiles = nullptr;
  std::int32_t row_tile_count = 0;
  const ColumnRange* column_ranges = nullptr;
  std::int32_t column_range_count = 0;
  std::int32_t rows = 0;
  std::int32_t columns = 0;
  std::int32_t tile_columns = 0;

  /// Position i sees j only if low ≤ j − i ≤ high …
  std::int32_t low = -kUnlimited;
  std::int32_t high = kUnlimited;
  /// … or, if one band does not say what positions show, these parts in the frame of its batch, or
  /// of its document.
  std::int32_t by_rule = 0;
  std::int32_t bottom_right = 0;  ///< alignment of documents
  PositionParts parts;
  PositionFrame frame;                             ///< of all batches, except as below
  const std::int32_t* offsets = nullptr;           ///< by batch; null: that of the frame
  const std::int32_t* prefixes = nullptr;          ///< likewise
  const std::int32_t* query_cu_seqlens = nullptr;  ///< of two packings; ids are their documents
  const std::int32_t* kv_cu_seqlens = nullptr;     ///< likewise
  /// By batch; null: no limit.
  const std::int32_t* query_lengths = nullptr;
  const std::int32_t* kv_lengths = nullptr;

  /// Runs in order of position. The runs of batch b begin at first_…_run[b] and end before
  /// first_…_run[b + 1]. Null: no ids.
  const QueryRun* query_runs = nullptr;
  const KeyRun* key_runs = nullptr;
  const std::int32_t* first_query_run = nullptr;
  const std::int32_t* first_key_run = nullptr;
  std::int32_t ids_ascend = 0;  ///< strictly, from run to run
  std::int32_t neighbours = 0;  ///< the keys of every id are

  /// One bit per key block, in rows of words; null: no block mask. A query in block q of its batch
  /// and head uses row first_block_row + batch · batch_rows + head · head_rows + q.
  const std::uint64_t* blocks = nullptr;
  std::int64_t first_block_row = 0;
  std::int64_t batch_rows = 0;
  std::int64_t head_rows = 0;
  std::int32_t words_per_row = 0;
  std::int32_t query_block = kWhole;
  std::int32_t key_block = kWhole;
};

/// The place of a query tile's segments, counted from the first segment of its thread block.
struct TilePlace {
  std::int32_t first_segment = 0;
  std::int32_t segments = 0;
};

struct ListOutput {
  QueryTile* tiles = nullptr;          ///< [batches][heads][row tiles], longest first
  KeySegment* segments = nullptr;      ///< in the order of row tiles
  RowKeys* row_keys = nullptr;         ///< [batches][rows]; null: not needed
  std::int32_t* row_ids = nullptr;     ///< likewise
  std::int32_t* column_ids = nullptr;  ///< [batches][columns]; likewise

  // Results of the first kernel for the second, in the order of row tiles.
  std::int32_t* key_tiles = nullptr;
  TilePlace* places = nullptr;
  std::int32_t* block_segments = nullptr;  ///< by thread block
};

}  // namespace annulus::flash
