#include <algorithm>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/visible_tiles.hpp>

namespace annulus {
namespace {

AttentionProblem problem_of(std::int64_t batch, std::int64_t rows, std::int64_t columns,
                            const Mask& mask, std::int64_t heads = 2) {
  AttentionProblem problem;
  problem.shape = {batch, rows, columns, heads, 1, 8, 8};
  problem.mask = mask;
  problem.validate();
  return problem;
}

// True if a tile at these positions has a visible pair.
bool shows(const AttentionProblem& problem, std::int64_t batch, std::int64_t head, std::int64_t row,
           std::int64_t column, std::int64_t tile) {
  for (std::int64_t i = row; i < std::min(row + tile, problem.shape.query_length); ++i) {
    for (std::int64_t j = column; j < std::min(column + tile, problem.shape.kv_length); ++j) {
      if (problem.mask.visible(batch, head, GlobalPosition(i), GlobalPosition(j))) return true;
    }
  }
  return false;
}

// Tiles are counted on the grid of the sequence. Kernels begin tiles at the first visible column,
// and so sometimes have one tile less.
std::vector<std::int64_t> on_the_grid(const AttentionProblem& problem, std::int64_t chunk,
                                      std::int64_t tile) {
  const AttentionShape& shape = problem.shape;
  const std::int64_t heads = problem.mask.depends_on_head() ? shape.heads : 1;
  std::vector<std::int64_t> tiles(
      static_cast<std::size_t>((shape.query_length + chunk - 1) / chunk));
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t row = 0; row < shape.query_length; row += tile) {
        for (std::int64_t column = 0; column < shape.kv_length; column += tile) {
          tiles[static_cast<std::size_t>(row / chunk)] +=
              shows(problem, b, h, row, column, tile) ? 1 : 0;
        }
      }
    }
  }
  return tiles;
}

TEST(VisibleTiles, CountsWhatMasksShow) {
  std::vector<Mask> exact(5);
  exact[0].set_causal(true);
  exact[1].set_query_lengths({11, 40});
  exact[2].set_block_mask(BlockMask::random(53, 53, 2, 0.4, 7, {4, 4}));
  exact[3].set_block_mask(BlockMask::random(53, 53, 2, 0.4, 7, {4, 4}));
  exact[3].set_causal(true);
  exact[4].set_kv_lengths({0, 17});
  for (const Mask& mask : exact) {
    const AttentionProblem problem = problem_of(2, 53, 53, mask);
    for (const std::int64_t chunk : {4, 8, 12}) {
      EXPECT_EQ(visible_tiles(problem, 0, 2, chunk, 4), on_the_grid(problem, chunk, 4))
          << to_string(mask) << " by " << chunk;
    }
  }
}

TEST(VisibleTiles, CountsDocumentsAndWindowsUpToATilePerRow) {
  std::vector<Mask> masks(5);
  for (Mask& mask : masks) mask.set_causal(true);
  masks[2].set_prefix(21);
  masks[3].set_chunk(9);
  masks[4].set_offsets({7});
  const std::vector<std::int32_t> cu{0, 3, 17, 18, 49, 53};
  const auto ids = segments_from_cu_seqlens(cu, 53);
  masks[0].set_segments(1, ids, ids);
  masks[1].set_causal(false);
  masks[1].set_window(9, 2);
  for (const Mask& mask : masks) {
    const AttentionProblem problem = problem_of(1, 53, 53, mask);
    const std::vector<std::int64_t> counted = visible_tiles(problem, 0, 1, 4, 4);
    const std::vector<std::int64_t> grid = on_the_grid(problem, 4, 4);
    for (std::size_t i = 0; i < grid.size(); ++i) {
      EXPECT_LE(counted[i], grid[i]) << to_string(mask);
      EXPECT_GE(counted[i] + 1, grid[i]) << to_string(mask);
    }
  }
}

TEST(VisibleTiles, CountsSomeOfTheBatches) {
  Mask mask;
  mask.set_kv_lengths({4, 8, 16});
  const AttentionProblem problem = problem_of(3, 8, 16, mask);
  EXPECT_EQ(visible_tiles(problem, 1, 2, 4, 4), (std::vector<std::int64_t>{6, 6}));
  EXPECT_EQ(visible_tiles(problem, 0, 1, 8, 4), (std::vector<std::int64_t>{2}));
  // Each of several equal batches counts.
  EXPECT_EQ(visible_tiles(problem_of(3, 8, 16, {}), 0, 3, 8, 4), (std::vector<std::int64_t>{24}));
  EXPECT_EQ(visible_tiles(problem_of(3, 8, 16, {}), 0, 0, 8, 4), (std::vector<std::int64_t>{0}));
}

TEST(VisibleTiles, OfEmptySequences) {
  EXPECT_TRUE(visible_tiles(problem_of(1, 0, 8, {}), 0, 1, 4, 4).empty());
  EXPECT_EQ(visible_tiles(problem_of(1, 8, 0, {}), 0, 1, 4, 4), (std::vector<std::int64_t>{0, 0}));
}

}  // namespace
}  // namespace annulus
