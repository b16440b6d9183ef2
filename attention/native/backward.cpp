#include "native/backward.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <vector>

#include <annulus/core/parallel.hpp>

#include "native/addition_order.hpp"
#include "native/block_checks.hpp"
#include "native/single_threaded_blas.hpp"
#include "native/tile_gradients.hpp"

namespace annulus {
namespace {

// The rows of a tile that stacks so many heads.
std::int64_t tile_length(const AttentionProblem& problem, std::int64_t heads) {
  const std::int64_t most = kGradientRows / heads;
  if (!problem.in_global_order()) return most;
  return std::min(kLeastRows,
                  static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(most))));
}

// Row tiles of batch 0, in order. None crosses the edge of a query block nor, where bits are not to
// depend on the shards, a multiple of the length.
std::vector<RowTile> row_tiles(const AttentionProblem& problem, const BackwardBlock& block,
                               std::int64_t length) {
  const std::optional<BlockMask>& blocks = problem.mask.block_mask();
  std::vector<RowTile> tiles;
  std::int64_t before = 0;
  for (const PositionRange& range : block.rows.ranges()) {
    std::int64_t end = 0;
    for (std::int64_t begin = 0; begin < range.length; begin = end) {
      const std::int64_t most =
          problem.in_global_order() ? length - range.at(begin).value() % length : length;
      end = std::min(begin + most, range.length);
      if (blocks) end = std::min(end, range.count_below(blocks->end_of_rows(range.at(begin))));
      tiles.push_back({0, LocalPosition(before + begin), range.slice(begin, end - begin)});
    }
    before += range.length;
  }
  return tiles;
}

// Batches and key/value heads of the same columns are neighbours: they rarely wait for each other.
std::vector<ColumnTile> column_tiles(const BackwardBlock& block) {
  std::vector<ColumnTile> tiles;
  std::int64_t before = 0;
  for (const PositionRange& range : block.columns.ranges()) {
    for (std::int64_t begin = 0; begin < range.length; begin += kGradientColumns) {
      const std::int64_t count = std::min(kGradientColumns, range.length - begin);
      for (std::int64_t batch = 0; batch < block.key.size(0); ++batch) {
        for (std::int64_t head = 0; head < block.key.size(2); ++head) {
          tiles.push_back({batch, head, before + begin, range.slice(begin, count)});
        }
      }
    }
    before += range.length;
  }
  return tiles;
}

// Column tiles of one batch and key/value head share the gradients of queries. A broadcast bias
// also joins batches or heads, and row tiles if it is broadcast over rows.
AdditionOrder order_of(const std::vector<ColumnTile>& columns, std::int64_t kv_heads,
                       std::int64_t steps, const TensorView& bias) {
  const bool wanted = bias.shape().rank() > 0;
  const bool joins_batches = wanted && bias.stride(0) == 0;
  const bool joins_heads = wanted && bias.stride(1) == 0;
  std::vector<std::int64_t> chains;
  chains.reserve(columns.size());
  for (const ColumnTile& tile : columns) {
    chains.push_back((joins_batches ? 0 : tile.batch * kv_heads) +
                     (joins_heads ? 0 : tile.kv_head));
  }
  const bool alone =
      wanted && bias.stride(2) == 0 && (joins_batches || joins_heads || bias.stride(3) == 0);
  return {chains, steps, alone};
}

}  // namespace

void add_native_gradients(const AttentionProblem& problem, const BackwardBlock& block,
                          const Gradients& gradients, const ExecutionContext& context,
                          MatrixPath path, MemoryPool& memory) {
  check_gradients(problem, block, gradients);
  context.stream.synchronize();  // the stream's earlier work comes first

  const std::int64_t kv_heads = block.key.size(2);
  // Heads that see different blocks have tiles of their own.
  const std::vector<HeadTile> heads =
      head_tiles(block.query.size(2), kv_heads, problem.mask.depends_on_head() ? 1 : kGradientRows);
  const auto heads_per_kv = static_cast<std::int64_t>(heads.size()) / kv_heads;
  const std::vector<RowTile> rows =
      row_tiles(problem, block, tile_length(problem, heads.front().count));
  const std::vector<ColumnTile> columns = column_tiles(block);
  const auto tasks = static_cast<std::int64_t>(columns.size());
  if (tasks == 0 || rows.empty()) return;

  const AttentionBlock forward = forward_of(block);
  const auto steps = static_cast<std::int64_t>(rows.size()) * heads_per_kv;
  AdditionOrder order = order_of(columns, kv_heads, steps, gradients.bias);
  const int workers = static_cast<int>(std::clamp<std::int64_t>(context.threads, 1, tasks));
  std::vector<TileGradients> kernels;
  kernels.reserve(static_cast<std::size_t>(workers));
  for (int i = 0; i < workers; ++i) {
    kernels.emplace_back(problem, block, forward, gradients, path, memory);
  }
  // Host streams belong to the calling thread, which is worker 0.
  const std::function<void()> progress = [&] {
    if (context.background != nullptr) context.background->progress();
  };
  const std::function<void()> nothing = [] {};
  const auto run = [&](std::int64_t task, int worker) {
    const std::function<void()>& between = worker == 0 ? progress : nothing;
    TileGradients& kernel = kernels[static_cast<std::size_t>(worker)];
    const ColumnTile& tile = columns[static_cast<std::size_t>(task)];
    kernel.start(tile);
    std::int64_t step = 0;
    for (RowTile row : rows) {
      row.batch = tile.batch;
      for (std::int64_t h = 0; h < heads_per_kv; ++h, ++step) {
        if (!kernel.take(row, heads[static_cast<std::size_t>(tile.kv_head * heads_per_kv + h)])) {
          continue;
        }
        order.wait(task, step, between);
        kernel.add_rows();
        order.pass(task, step);
        between();
      }
    }
    kernel.add_columns();
    order.wait(task, steps - 1, between);
    order.leave(task);
  };
  const SingleThreadedBlas single_threaded_blas(workers);
  parallel_for(
      tasks, workers,
      [&](std::int64_t task, int worker) {
        try {
          run(task, worker);
        } catch (...) {
          order.leave(task);  // nobody may wait for it for ever
          throw;
        }
      },
      progress);
}

}  // namespace annulus
