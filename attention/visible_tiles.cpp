#include <cstddef>

#include <annulus/attention/visible_tiles.hpp>

#include "flash/work_list.hpp"

namespace annulus {

std::vector<std::int64_t> visible_tiles(const AttentionProblem& problem, std::int64_t batch,
                                        std::int64_t batches, std::int64_t chunk,
                                        std::int64_t tile) {
  const AttentionShape& shape = problem.shape;
  const Mask& mask = problem.mask;
  const PositionRanges rows = PositionRanges::all(shape.query_length);
  const PositionRanges columns = PositionRanges::all(shape.kv_length);
  const std::int64_t each = mask.depends_on_batch() ? 1 : batches;  // batches that a list is for
  const std::int64_t heads = mask.depends_on_head() ? shape.heads : 1;
  std::vector<std::int64_t> tiles(
      static_cast<std::size_t>((shape.query_length + chunk - 1) / chunk));
  for (std::int64_t b = 0; b < batches; b += each) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const flash::WorkList list = flash::list_work(mask, {batch + b, 1, head, 1}, rows, columns,
                                                    static_cast<int>(tile), static_cast<int>(tile));
      for (const flash::QueryTile& row_tile : list.tiles) {
        tiles[static_cast<std::size_t>(row_tile.first_row / chunk)] += each * row_tile.key_tiles;
      }
    }
  }
  return tiles;
}

}  // namespace annulus
