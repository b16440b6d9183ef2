#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/partition/position.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// A run of an origin's columns, within one of its chunks.
struct ColumnPiece {
  LocalRange columns;       ///< local columns of the origin
  PositionRange positions;  ///< their global positions
  bool operator==(const ColumnPiece&) const = default;
};

/// Joins pieces that are neighbours at their owner and can be sent as one message.
[[nodiscard]] std::vector<std::vector<ColumnPiece>> joined(const std::vector<ColumnPiece>& pieces);
/// The columns of each group of such pieces.
[[nodiscard]] std::vector<LocalRange> runs_of(const std::vector<ColumnPiece>& pieces);

/// Which columns the ranks of one key/value group need of each other. Pure, and the same on every
/// rank that asks.
class KvNeeds {
 public:
  /// `group`: the mesh ranks of the group, by group rank. The references must outlive the object.
  KvNeeds(const AttentionProblem& problem, const ShardedOperands& operands, std::vector<int> group);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(group_.size()); }
  [[nodiscard]] const std::vector<int>& group() const noexcept { return group_; }

  /// The most messages that a receiver gets from an origin, however scattered its columns are.
  static constexpr std::size_t kMostMessages = 8;

  /// The columns of `origin` that some row of `receiver` sees, one hull per chunk, in local order.
  /// They form at most kMostMessages runs of local columns: if there would be more, the narrowest
  /// gaps between runs are filled with columns that no row of the receiver sees.
  [[nodiscard]] const std::vector<ColumnPiece>& of(int receiver, int origin) const;

 private:
  /// What a rank of the group holds; kept because it is needed often.
  struct Shard {
    bool known = false;
    std::int64_t first_batch = 0;
    std::int64_t batches = 0;
    PositionRanges rows;
    PositionRanges columns;
  };
  [[nodiscard]] const Shard& shard(int group_rank) const;

  const AttentionProblem& problem_;
  const ShardedOperands& operands_;
  std::vector<int> group_;
  mutable std::vector<Shard> shards_;
  mutable std::unordered_map<std::int64_t, std::vector<ColumnPiece>> known_;
};

}  // namespace annulus::ring
