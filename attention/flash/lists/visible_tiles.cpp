#include <cstddef>

#include <annulus/attention/visible_tiles.hpp>
#include <annulus/core/division.hpp>

#include "flash/lists/list_plan.hpp"
#include "flash/lists/tile_walk.hpp"

namespace annulus {
namespace {

// count_tile() runs on the lanes of a warp; on a host it has one lane.
struct OneLane {
  static constexpr std::int32_t kCount = 1;
  [[nodiscard]] static std::int32_t lane() { return 0; }
  [[nodiscard]] static std::int32_t sum(std::int32_t x) { return x; }
};

}  // namespace

std::vector<std::int64_t> visible_tiles(const AttentionProblem& problem, std::int64_t batch,
                                        std::int64_t batches, std::int64_t chunk,
                                        std::int64_t tile) {
  const AttentionShape& shape = problem.shape;
  const Mask& mask = problem.mask;
  const flash::ListPlan plan(
      mask, {batch, batches, 0, shape.heads}, PositionRanges::all(shape.query_length),
      PositionRanges::all(shape.kv_length), static_cast<int>(tile), static_cast<int>(tile));
  const flash::ListInput in = plan.input(plan.numbers().data(), plan.blocks().data());
  const std::int64_t each = mask.depends_on_batch() ? 1 : batches;  // batches that a list is for
  std::vector<std::int64_t> tiles(static_cast<std::size_t>(ceil_divide(shape.query_length, chunk)));
  for (std::int32_t b = 0; b < in.batches; ++b) {
    for (std::int32_t h = 0; h < in.heads; ++h) {
      for (std::int32_t t = 0; t < in.row_tile_count; ++t) {
        const flash::TileCount count = count_tile(flash::TileWalk(in, b, h, t), OneLane());
        tiles[static_cast<std::size_t>(in.row_tiles[t].first_row / chunk)] +=
            each * count.key_tiles;
      }
    }
  }
  return tiles;
}

}  // namespace annulus
