#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {

/// Columns in a buffer, from token `token` on.
struct PlacedPiece {
  ColumnPiece piece;
  std::int64_t token = 0;
};

/// Columns at these positions that lie side by side from token 0 on.
[[nodiscard]] std::vector<PlacedPiece> side_by_side(const PositionRanges& columns);

/// Finds the blocks of a rank's rows against some columns, and the implementations that compute
/// them. A tile goes to the candidate that is predicted to be fastest, or is cut into parts if that
/// is faster. A tile is cut by batches, by ranges of positions, by documents, or by pieces of
/// columns.
class BlockFinder {
 public:
  /// Finds blocks of rows at these positions.
  BlockFinder(const RankContext& context, const RankPlan& plan, PositionRanges rows);

  /// Blocks of all rows that see any of these columns, for these query heads; in the backward pass,
  /// for these gradients. The columns lie in the buffer without gaps between them. Buffers and
  /// results are left to the caller.
  [[nodiscard]] std::vector<Block> find(HeadRange heads, const std::vector<PlacedPiece>& columns,
                                        GradientSides gradients = {}) const;
  /// The same with the candidates that can await columns; with all candidates if these candidates
  /// do not take every block.
  [[nodiscard]] std::vector<Block> find_awaiting(HeadRange heads,
                                                 const std::vector<PlacedPiece>& columns) const;
  [[nodiscard]] bool awaits_columns(const Block& block) const;

 private:
  struct Tile {
    LocalRange rows;
    BatchRange batches;
    std::vector<PlacedPiece> columns;
  };
  /// Blocks and their predicted seconds.
  struct Priced {
    std::vector<Block> blocks;
    double seconds = 0;
    std::string obstacle;  ///< why no candidate takes it
  };

  /// The candidates that are asked, and the gradients that they are asked for.
  struct Asked {
    bool awaiting = false;  ///< only candidates that can await columns
    GradientSides gradients = {};
  };
  [[nodiscard]] Priced solve(HeadRange heads, const Tile& tile, const Asked& asked) const;
  [[nodiscard]] Tile whole(const std::vector<PlacedPiece>& columns) const;
  [[nodiscard]] double seconds_with_handover(const Block& block) const;
  /// The block of the rows that see any of the columns; it has no pairs if no row does.
  [[nodiscard]] Block hull_of(const Tile& tile) const;
  /// The block of all its rows and columns.
  [[nodiscard]] Block all_of(Block block, const Tile& tile) const;
  [[nodiscard]] static PositionRanges in_one(const PositionRanges& positions);
  /// The block by the candidate that is predicted to be fastest; whether parts of it may be faster.
  [[nodiscard]] Priced price(Block block, const Asked& asked, bool& worth_cutting) const;
  /// Smaller tiles that may be simpler; empty if there is nothing to cut.
  [[nodiscard]] std::vector<Tile> cut(const Tile& tile) const;
  [[nodiscard]] std::vector<Tile> cut_documents(const Tile& tile) const;
  [[nodiscard]] static std::vector<Tile> by_batch(const Tile& tile);

  const RankContext& context_;
  const RankPlan& plan_;
  PositionRanges rows_;
};

/// Why a candidate cannot compute this block: its own answer, or its refusal when it was prepared.
/// Empty if it can.
[[nodiscard]] std::string obstacle_of(const Implementation& candidate, const PlanInput& input,
                                      const RankPlan& plan, const Tile& block);

/// Why a candidate refused this block when it was prepared: the block itself, or only `rounding`
/// its result into the caller's output. Empty if it did not.
[[nodiscard]] std::string refusal_of(const Implementation& candidate, const PlanInput& input,
                                     const RankPlan& plan, const Tile& block, bool rounding);

}  // namespace annulus::ring
