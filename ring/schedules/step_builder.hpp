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
  /// Enlarges a buffer to hold `slots` slots.
  void reserve(int buffer, std::int64_t slots);

  [[nodiscard]] Step& step(std::size_t index);

  /// The rank's own columns, as they lie in the input buffer.
  [[nodiscard]] std::vector<PlacedPiece> own_columns() const;
  /// Adds to step `index` the block of all rows that see any of these columns of `buffer`, which
  /// lie there without gaps between them. Nothing is added if none does. Blocks must be added in
  /// the order of the steps.
  void add_block(std::size_t index, int buffer, const std::vector<PlacedPiece>& columns);

  /// Adds one message to step `index`.
  void add_send(std::size_t index, int peer, int origin, int buffer, LocalRange slots);
  void add_receive(std::size_t index, int peer, int origin, int buffer, LocalRange slots);

  /// Drops steps at the end that do nothing, and hands the plan over.
  [[nodiscard]] RankPlan finish();

 private:
  void add_transfer(std::vector<Transfer>& transfers, int peer, int origin, int buffer,
                    LocalRange slots) const;

  const RankContext& context_;
  RankPlan plan_;
  PositionRanges rows_;
};

/// The smallest run that holds both.
[[nodiscard]] LocalRange hull(const LocalRange& a, const LocalRange& b);

}  // namespace annulus::ring
