#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "flash/lists/list_input.hpp"

namespace annulus::flash::backward {

/// The common properties of a tile's rows and columns.
struct RowHull {
  RowKeys any;  ///< keys that some row may see
  RowKeys all;  ///< keys that all rows see, apart from ids and blocks
  std::int32_t first_id, last_id;
  std::int32_t first_block, last_block;  ///< of the block mask
};
struct ColumnHull {
  /// The lowest and the highest position. `last` is kNowhere if some column does not exist, and so
  /// is `first` if none does.
  std::int32_t first, last;
  std::int32_t first_id, last_id;
};

/// The work of a key tile, summed over the batches and heads that have lists of their own.
struct TileWork {
  std::int32_t steps;  ///< query tiles that see some of it
  std::int32_t span;   ///< query tiles from the first to the last of them
};

/// A mask that is not one straight band: which query tiles see which key tiles, and the data that
/// decide about pairs of masked tiles. Rows and columns of a tile are neighbours in memory,
/// whatever their positions. Arrays lie in device memory. Where the last tiles extend past the last
/// row or column, nothing is visible.
struct TileMask {
  /// The position of a column that does not exist.
  static constexpr std::int32_t kNowhere = 0x7fffffff;

  std::int32_t batches = 0, heads = 0;  ///< batches and heads with lists of their own
  std::int32_t query_tiles = 0, key_tiles = 0;
  /// Words of 32 bits of a row of bits for query tiles, and for key tiles.
  std::int32_t query_words = 0, key_words = 0;
  /// For 32 query tiles, bits of those that see some of a key tile, then bits of those that see all
  /// of it: [batches][heads][key tiles][query words][2].
  std::uint32_t* query_bits = nullptr;
  /// Bits of key tiles of which a query tile sees some, [batches][heads][query tiles][key words].
  std::uint32_t* key_bits = nullptr;
  /// For each word of key_bits, the number of bits set in earlier words of the same row; null: not
  /// needed.
  std::int32_t* key_ranks = nullptr;
  /// The largest number of bits set in a row of key_bits, on the device; null if key_ranks is.
  std::int32_t* most_keys = nullptr;

  /// The work of each key tile, [key tiles].
  TileWork* work = nullptr;
  /// Key tiles in the order in which blocks should begin them; null: in ascending order.
  std::int32_t* key_tile_order = nullptr;

  /// [batches][query tiles · rows of a tile]: keys by position, length and document.
  RowKeys* row_keys = nullptr;
  std::int32_t* row_ids = nullptr;           ///< likewise; null: ids do not matter
  std::int32_t* row_blocks = nullptr;        ///< [rows], query blocks; null: no block mask
  std::int32_t* row_positions = nullptr;     ///< [query tiles · rows of a tile]; null: not needed
  std::int32_t* column_positions = nullptr;  ///< [key tiles · columns of a tile]
  std::int32_t* column_ids = nullptr;        ///< [batches][likewise]; null as row_ids

  RowHull* row_hulls = nullptr;        ///< [batches][query tiles]
  ColumnHull* column_hulls = nullptr;  ///< [batches][key tiles]

  // The block mask, as in ListInput.
  const std::uint64_t* blocks = nullptr;
  std::int64_t first_block_row = 0, batch_rows = 0, head_rows = 0;
  std::int32_t words_per_row = 0, key_block = 1;
};

/// Enqueues the kernels that fill the mask's arrays. The input's tiles of rows have any size;
/// `tile_rows` and `tile_columns` are the mask's. `last_key`: the last position of a column.
[[nodiscard]] cudaError_t launch_tile_mask(const ListInput& input, const TileMask& mask,
                                           int tile_rows, int tile_columns, std::int32_t last_key,
                                           cudaStream_t stream);

}  // namespace annulus::flash::backward
