#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/position.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// A run of an origin's columns, within one of its chunks.
struct ColumnPiece {
  LocalRange columns;       ///< local columns of the origin
  PositionRange positions;  ///< their global positions
  bool operator==(const ColumnPiece&) const = default;
};

/// Joins pieces that are neighbours at their owner and can be sent as one message.
[[nodiscard]] std::vector<std::vector<ColumnPiece>> joined(std::span<const ColumnPiece> pieces);
/// Adds runs to sorted ones, so that they neither touch nor overlap.
void join(std::vector<LocalRange>& runs, const std::vector<LocalRange>& more);
/// The columns of each group of joined pieces.
[[nodiscard]] std::vector<LocalRange> runs_of(std::span<const ColumnPiece> pieces);

/// The rows of queries and the columns of keys and values that a member of a group holds.
struct HeldSequence {
  std::int64_t first_batch = 0;
  std::int64_t batches = 0;
  PositionRanges rows;
  PositionRanges columns;
};

/// The rows and columns that a rank of the mesh holds.
[[nodiscard]] HeldSequence held_by(const ShardedOperands& operands, int rank);

/// The columns that the members of a group need of each other. Pure, and the same on every rank.
/// The plan of one member asks for O(P) of the P² pairs; answers are remembered.
class KvNeeds {
 public:
  /// `held(i)` returns what member i holds; it is called at most once for each, and only if needed.
  /// The references must outlive the object.
  KvNeeds(const AttentionProblem& problem, int members, std::function<HeldSequence(int)> held);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }

  /// The most messages from an origin to a receiver, however scattered the columns are.
  static constexpr std::size_t kMaximumMessages = 8;

  /// The columns of `origin` that some row of `receiver` sees, one hull per chunk, in local order.
  /// They form at most kMaximumMessages runs of local columns: if there would be more, the
  /// narrowest gaps between runs are filled with columns that no row of the receiver sees. The
  /// result lives until forget_some().
  [[nodiscard]] std::span<const ColumnPiece> of(int receiver, int origin) const;
  /// True if there are such columns.
  [[nodiscard]] bool sees(int receiver, int origin) const { return !of(receiver, origin).empty(); }
  /// Adds to `runs` the columns of `origin` that any of the members `first`, `first` + 1, … needs:
  /// sorted runs that neither touch nor overlap. Looks at few of the members, unless the mask is
  /// irregular.
  void add_of_any(std::vector<LocalRange>& runs, int origin, int first, int count) const;
  /// The same for groups of `count` neighbouring members, each of which holds together what they
  /// hold (see Gathering). `count` divides the number of members.
  [[nodiscard]] const KvNeeds& of_neighbours(int count) const;
  /// Bounds the memory of remembered pairs. To be called between the plans of two members.
  void forget_some();

 private:
  [[nodiscard]] const HeldSequence& member(int index) const;
  [[nodiscard]] const std::vector<PositionRange>& row_hulls(int level, int index) const;
  [[nodiscard]] bool may_add(const std::vector<LocalRange>& runs, int origin, int level,
                             int index) const;
  void add_of_block(std::vector<LocalRange>& runs, int origin, int level, int index) const;

  const AttentionProblem& problem_;
  std::function<HeldSequence(int)> held_;
  mutable std::vector<std::optional<HeldSequence>> members_;
  // By level and index: hulls of the rows of the members [index << level, (index + 1) << level).
  using Hulls = std::optional<std::vector<PositionRange>>;
  mutable std::vector<std::vector<Hulls>> hulls_;
  // Holds thousands of small pieces, which are freed together.
  mutable std::pmr::monotonic_buffer_resource memory_;
  using Known = std::pmr::unordered_map<std::size_t, std::pmr::vector<ColumnPiece>>;
  mutable std::optional<Known> known_{&memory_};                // by pair
  mutable std::map<int, std::unique_ptr<KvNeeds>> neighbours_;  // by their number
};

}  // namespace annulus::ring
