#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/memory.hpp>

#include "native/row_softmax.hpp"
#include "native/tile_product.hpp"
#include "native/tile_visibility.hpp"
#include "native/tiles.hpp"

namespace annulus {

/// Computes tiles of one block, one after the other, in a workspace of its own. The heads of a tile
/// are stacked: row r · heads + h of the workspace is head h of query row r, so one key tile serves
/// all of them, and neighbouring query rows are neighbours.
class TileKernel {
 public:
  /// Everything referred to must outlive the kernel. No tile may have more than `max_rows` stacked
  /// rows.
  TileKernel(const AttentionProblem& problem, const AttentionBlock& block,
             const SoftmaxState& result, std::int64_t max_rows, MatrixPath path,
             MemoryPool& memory);

  /// Writes the result of the tile's rows and heads, which see the same blocks. Calls `between`
  /// after each product of tiles.
  void run(const RowTile& tile, const HeadTile& heads, const std::function<void()>& between);

 private:
  void load_queries(const RowTile& tile, const HeadTile& heads);
  void visit(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
             std::int64_t first_column, const std::function<void()>& between);
  /// A run of visible blocks: entries of `columns`.
  void visit_run(const RowTile& tile, const HeadTile& heads, const PositionRange& columns,
                 LocalRange run, std::int64_t first_column, const std::function<void()>& between);
  /// `full`: the mask shows every pair; `shown`: so does the dense mask.
  void multiply(const RowTile& tile, const HeadTile& heads, LocalRange rows,
                const PositionRange& columns, std::int64_t first_column, bool full, bool shown);
  /// Turns the logits of a strip, whose columns are `columns`, into weights.
  void softmax(const RowTile& tile, const HeadTile& heads, Strip strip,
               const PositionRange& columns, std::int64_t first_column, bool full, bool shown);
  /// Adds the values that the product left out to the rows that see them.
  void add_poison(const RowTile& tile, const HeadTile& heads, Strip strip,
                  const PositionRange& columns, std::int64_t first_column);
  void store(const RowTile& tile, const HeadTile& heads);

  const AttentionProblem& problem_;
  const AttentionBlock& block_;
  const SoftmaxState& result_;
  const TileVisibility visibility_;
  const std::int64_t value_dim_;
  std::vector<RowSoftmax> row_softmax_;  // per stacked row
  std::unique_ptr<TileProduct> product_;
};

}  // namespace annulus
