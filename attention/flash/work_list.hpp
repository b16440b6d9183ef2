#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/mask.hpp>
#include <annulus/partition/position.hpp>

#include "flash/batches_and_heads.hpp"
#include "flash/work.hpp"

namespace annulus::flash {

/// The tiles of a block that the kernel has to visit: for every query tile the key tiles that some
/// row sees.
/// Batches share it where the mask does not depend on them, and so do heads.
struct WorkList {
  std::int64_t batches = 1;  ///< that have lists of their own: all of the block, or one for all
  std::int64_t heads = 1;    ///< likewise query heads
  /// [batches][heads], those of a list from the longest to the shortest.
  std::vector<QueryTile> tiles;
  std::vector<KeySegment> segments;
  /// Keys and ids for masked tiles that bands do not decide, [batches][rows] and [batches][columns]
  /// in local order.
  /// Keys of rows where one band does not say what positions show, and for ids whose keys are
  /// neighbours; ids where they are not. Neither for ids that tiles decide.
  std::vector<RowKeys> row_keys;
  std::vector<std::int32_t> row_ids, column_ids;

  std::int64_t key_tiles = 0;  ///< of all lists
  bool hides_values = false;   ///< some segment does
  bool asks_ids = false;       ///< some tile holds pairs that only their ids tell apart

  [[nodiscard]] std::int32_t tiles_per_list() const {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(tiles.size()) / (batches * heads));
  }
};

/// The reference for the lists that DeviceLists makes for the kernels; visible_tiles(), tests and
/// benchmarks call it.
///
/// Tiles have tile_rows × tile_columns entries and begin anew with each position range, rows also
/// with each query block and columns behind each hidden key block. Takes O(tiles + segments), and
/// O(rows + columns + keys of the whole sequence) per list where there are segment ids. Positions
/// must lie below 2^28.
[[nodiscard]] WorkList list_work(const Mask& mask, const BatchesAndHeads& of,
                                 const PositionRanges& rows, const PositionRanges& columns,
                                 int tile_rows, int tile_columns);

}  // namespace annulus::flash
