#pragma once

#include <cstdint>
#include <vector>

#include <annulus/ring/plan.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {

/// Columns at rest in a buffer, from slot `slot` on.
struct PlacedPiece {
  ColumnPiece piece;
  std::int64_t slot = 0;
};

/// What every schedule needs to fill a RankPlan.
class StepBuilder {
 public:
  /// Starts a plan with the input buffer.
  explicit StepBuilder(const RankContext& context);

  /// Index of the new buffer.
  int add_buffer(const KvBuffer& buffer);
  /// Packed copies of `columns`, for sending.
  int add_packed(LocalRange columns, HeadRange kv_heads);
  [[nodiscard]] Step& step(std::size_t index);

  /// The rank's own columns, as they lie in the input buffer.
  [[nodiscard]] std::vector<PlacedPiece> own_columns() const;
  /// Adds to step `index` the block of all rows that see any of these columns of `buffer`, for the
  /// query heads that read `kv_heads`; or several, where blocks are to be straight. The columns lie
  /// in the buffer without gaps between them. Nothing is added if no row sees any. Blocks must be
  /// added in the order of the steps.
  void add_block(std::size_t index, int buffer, HeadRange kv_heads,
                 const std::vector<PlacedPiece>& columns);

  /// Adds one message to step `index`.
  void add_send(std::size_t index, int peer, int origin, int buffer, LocalRange slots);
  void add_receive(std::size_t index, int peer, int origin, int buffer, LocalRange slots);

  /// Drops steps at the end that do nothing, and hands the plan over.
  [[nodiscard]] RankPlan finish();

 private:
  /// The block of those of `rows` that see any of the columns; no pairs if none does.
  [[nodiscard]] Block hull_of(LocalRange rows, const std::vector<PlacedPiece>& columns) const;
  [[nodiscard]] bool is_straight(const Block& block) const;
  /// Runs of rows that may make straighter blocks than `rows` together: ranges of positions, or
  /// within one range, documents. Just `rows` if there is nothing to cut.
  [[nodiscard]] std::vector<LocalRange> cut(LocalRange rows) const;
  void add_blocks(Step& step, const Block& frame, LocalRange rows,
                  const std::vector<PlacedPiece>& columns);
  void add_transfer(std::vector<Transfer>& transfers, int peer, int origin, int buffer,
                    LocalRange slots) const;

  const RankContext& context_;
  RankPlan plan_;
  PositionRanges rows_;
};

/// The smallest run that holds both.
[[nodiscard]] LocalRange hull(const LocalRange& a, const LocalRange& b);

}  // namespace annulus::ring
