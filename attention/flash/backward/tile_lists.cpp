#include "flash/backward/tile_lists.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/division.hpp>

#include "cuda/upload.hpp"

namespace annulus::flash::backward {
TileLists::TileLists(const Mask& mask, const BatchesAndHeads& of, const PositionRanges& rows,
                     const PositionRanges& columns, int tile_rows, int tile_columns,
                     bool row_positions, bool key_ranks, MemoryPool& memory) {
  const ListPlan plan(mask, of, rows, columns, tile_rows, tile_columns);
  const Tensor numbers = upload(plan.numbers(), memory);
  const std::span<const std::uint64_t> blocks = plan.blocks();
  buffers_.push_back(
      upload({reinterpret_cast<const std::int64_t*>(blocks.data()), blocks.size()}, memory));
  const ListInput input = plan.input(static_cast<const std::int32_t*>(numbers.view().data()),
                                     static_cast<const std::uint64_t*>(buffers_.back().data()));

  TileMask& m = mask_;
  m.batches = input.batches;
  m.heads = input.heads;
  const auto divide = [](std::int64_t a, std::int64_t b) {
    return static_cast<std::int32_t>(ceil_divide(a, b));
  };
  m.query_tiles = divide(input.rows, tile_rows);
  m.key_tiles = divide(input.columns, tile_columns);
  m.query_words = divide(m.query_tiles, 32);
  m.key_words = divide(m.key_tiles, 32);
  const std::int64_t lists = std::int64_t{m.batches} * m.heads;
  const std::int64_t padded_rows = std::int64_t{m.query_tiles} * tile_rows;
  const std::int64_t padded_columns = std::int64_t{m.key_tiles} * tile_columns;
  m.query_bits = take<std::uint32_t>(lists * m.key_tiles * m.query_words * 2, memory);
  m.key_bits = take<std::uint32_t>(lists * m.query_tiles * m.key_words, memory);
  if (key_ranks) {
    m.key_ranks = take<std::int32_t>(lists * m.query_tiles * m.key_words, memory);
    m.most_keys = take<std::int32_t>(1, memory);
  }
  m.work = take<TileWork>(m.key_tiles, memory);
  m.row_keys = take<RowKeys>(m.batches * padded_rows, memory);
  if (row_positions) m.row_positions = take<std::int32_t>(padded_rows, memory);
  m.column_positions = take<std::int32_t>(padded_columns, memory);
  m.row_hulls = take<RowHull>(std::int64_t{m.batches} * m.query_tiles, memory);
  m.column_hulls = take<ColumnHull>(std::int64_t{m.batches} * m.key_tiles, memory);
  if (plan.asked() == Asked::ids) {
    m.row_ids = take<std::int32_t>(m.batches * padded_rows, memory);
    m.column_ids = take<std::int32_t>(m.batches * padded_columns, memory);
  }
  if (input.blocks != nullptr) {
    m.row_blocks = take<std::int32_t>(padded_rows, memory);
    m.blocks = input.blocks;
    m.first_block_row = input.first_block_row;
    m.batch_rows = input.batch_rows;
    m.head_rows = input.head_rows;
    m.words_per_row = input.words_per_row;
    m.key_block = input.key_block;
  }
  std::int64_t last_key = 0;
  for (const PositionRange& range : columns.ranges()) {
    last_key = std::max(last_key, range.last().value());
  }
  check_cuda(launch_tile_mask(input, m, tile_rows, tile_columns,
                              static_cast<std::int32_t>(last_key), nullptr),
             "launching the kernels that make lists of tiles");
  check_cuda(cudaStreamSynchronize(nullptr), "making lists of tiles");
  std::vector<TileWork> work(static_cast<std::size_t>(m.key_tiles));
  check_cuda(cudaMemcpy(work.data(), m.work, work.size() * sizeof(TileWork), cudaMemcpyDefault),
             "reading the work of key tiles");
  if (key_ranks) {
    check_cuda(cudaMemcpy(&most_keys_, m.most_keys, sizeof most_keys_, cudaMemcpyDefault),
               "reading the number of key tiles");
  }
  double steps = 0, span = 0;
  std::int32_t most = 0;
  for (const TileWork& tile : work) {
    steps += tile.steps;
    span += tile.span;
    most = std::max(most, tile.steps);
  }
  const double mean_span = span * tile_rows / static_cast<double>(lists * m.key_tiles);
  rows_at_a_time_ = span > 0 ? mean_span * (2 - steps / span) : 1;
  order_by_work(work, steps / static_cast<double>(m.key_tiles), most, memory);
}

// A block with much work that begins late would run alone at the end, so key tiles with much work
// come first. But neighbouring key tiles share rows in L2 and should stay together, so they are
// only sorted into three groups, and not at all if no key tile stands out.
void TileLists::order_by_work(const std::vector<TileWork>& work, double mean, std::int32_t most,
                              MemoryPool& memory) {
  if (most <= 2 * mean) return;
  const auto group = [&](std::int32_t tile) {
    const std::int32_t steps = work[static_cast<std::size_t>(tile)].steps;
    return steps > mean ? 0 : steps > mean / 2 ? 1 : 2;
  };
  std::vector<std::int32_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t x, std::int32_t y) { return group(x) < group(y); });
  mask_.key_tile_order = take<std::int32_t>(mask_.key_tiles, memory);
  check_cuda(cudaMemcpy(mask_.key_tile_order, order.data(), order.size() * sizeof(std::int32_t),
                        cudaMemcpyDefault),
             "writing the order of key tiles");
}

template <class T>
T* TileLists::take(std::int64_t count, MemoryPool& memory) {
  buffers_.push_back(
      memory.allocate(static_cast<std::size_t>(count) * sizeof(T), "lists of tiles"));
  return static_cast<T*>(buffers_.back().data());
}

}  // namespace annulus::flash::backward
