#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <annulus/attention/local_mask.hpp>
#include <annulus/attention/mask.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// A rectangle of a block, with its mask in local indices.
struct StraightPiece {
  std::int64_t first_batch = 0;  ///< relative to the block's first batch
  std::int64_t batches = 0;
  LocalRange rows;         ///< entries of the block's rows
  LocalRange columns;      ///< likewise
  LocalMask mask;          ///< with an obstacle only if no straight cut exists
  std::int64_t pairs = 0;  ///< visible (row, column) pairs, over its batches

  /// Whether every pair is visible.
  [[nodiscard]] bool full() const {
    return mask.obstacle.empty() && !mask.band.limited() && !mask.padded();
  }
};

/// Cuts a block into pieces that kernels with one straight band and a length per batch can take:
/// every visible pair lies in exactly one piece, and within a piece LocalMask shows what the mask
/// shows. The arguments are those of local_mask(); the pieces come in order of batch, row, column.
///
/// The pieces are few and tight:
/// - a block that is straight as it lies is one piece; else it is cut by document, then by runs of
///   row positions, then where the columns do not continue along the diagonal;
/// - batches that need the same cuts share their pieces, with lengths of their own where the
///   columns end differently;
/// - no row or column at an edge of a piece is without a visible pair, so that in a piece without
///   lengths every row sees something;
/// - pieces of one batch that meet in rows agree in them or are about different columns of the same
///   documents. Rows of one document are never in a piece with rows of another one.
///
/// No cut makes a diagonal between rows and columns of different strides straight. Such a piece has
/// an obstacle and needs a kernel that evaluates the mask itself. So does the whole block, as one
/// piece, if more than `most` pieces would be needed.
///
/// The cost is linear in the documents that the rows reach, times the runs of columns that each of
/// them reaches.
[[nodiscard]] std::vector<StraightPiece> straight_pieces(
    const Mask& mask, std::int64_t first_batch, std::int64_t batches, const PositionRanges& rows,
    const PositionRanges& columns, std::int64_t most = std::numeric_limits<std::int64_t>::max());

}  // namespace annulus
