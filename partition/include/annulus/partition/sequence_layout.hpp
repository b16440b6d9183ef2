#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/position.hpp>

namespace annulus {

/// The positions of a sequence that each rank holds, as a list instead of a formula: for example,
/// rows distributed by their work (see ring::assign_rows()). Plain data; copies share it.
class Assignment {
 public:
  /// Takes the positions of each rank. Throws ArgumentError("assignment", …) unless there is a
  /// rank, all ranges have stride 1, a rank's ranges ascend, and every position from 0 to the last
  /// is held by exactly one rank.
  explicit Assignment(std::vector<PositionRanges> by_rank);

  [[nodiscard]] std::int64_t length() const noexcept { return data_->length; }
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(data_->by_rank.size()); }
  /// Requires a rank in [0, ranks()).
  [[nodiscard]] const PositionRanges& positions(int rank) const {
    return data_->by_rank[static_cast<std::size_t>(rank)];
  }
  /// The rank that holds a position in [0, length()). Takes time logarithmic in the number of
  /// ranges.
  [[nodiscard]] int owner(GlobalPosition position) const;
  /// 32 hexadecimal digits, equal for equal assignments.
  [[nodiscard]] const std::string& digest() const noexcept { return data_->digest; }
  bool operator==(const Assignment& other) const {
    return data_ == other.data_ || data_->by_rank == other.data_->by_rank;
  }

 private:
  struct Run {
    GlobalPosition begin;
    std::int64_t length;
    int rank;
  };
  struct Data {
    std::vector<PositionRanges> by_rank;
    std::vector<Run> runs;  // of all ranks, in ascending order
    std::int64_t length = 0;
    std::string digest;
  };
  std::shared_ptr<const Data> data_;
};

/// How a sequence is divided among the P ranks of its axes (docs/semantics.md §4).
enum class LayoutKind : std::uint8_t {
  contiguous,  ///< rank r holds chunk r of P
  zigzag,      ///< rank r holds chunks r and 2P−1−r of 2P: equal causal work
  striped,     ///< rank r holds positions r, r+P, r+2P, …
  balanced     ///< rank r holds the positions of an Assignment: equal work under a mask
};

[[nodiscard]] std::string_view name_of(LayoutKind kind) noexcept;
/// Throws ArgumentError(argument, …) for an unknown name.
[[nodiscard]] LayoutKind parse_layout(std::string_view name,
                                      const std::string& argument = "sequence layout");

/// A bijection between global positions and (rank, local position). Plain data; no communication.
///
/// Contiguous and zigzag cut the sequence into chunks of whole granules. If the number of granules
/// is not divisible, the first chunks get one more: 10 positions on 4 ranks are 3, 3, 2 and 2. A
/// remainder shorter than a granule goes to the last chunk, so sizes differ by at most one granule.
/// Striped has the granule 1. If there are fewer positions than ranks, some ranks hold nothing.
/// Balanced follows its assignment.
class SequenceLayout {
 public:
  /// `length` ≥ 0 positions on `ranks` ≥ 1 ranks; `granule` ≥ 1, and 1 if striped. Throws
  /// ArgumentError, also for the kind balanced, which needs an assignment.
  SequenceLayout(LayoutKind kind, std::int64_t length, int ranks, std::int64_t granule = 1);
  /// Makes a balanced layout.
  explicit SequenceLayout(Assignment assignment);

  [[nodiscard]] LayoutKind kind() const noexcept { return kind_; }
  [[nodiscard]] std::int64_t length() const noexcept { return length_; }
  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  [[nodiscard]] std::int64_t granule() const noexcept { return granule_; }

  /// The positions that `rank` holds, in local order: one range per non-empty chunk.
  [[nodiscard]] PositionRanges positions(int rank) const;
  /// The rank that holds a position in [0, length).
  [[nodiscard]] int owner(GlobalPosition position) const;
  bool operator==(const SequenceLayout&) const = default;

 private:
  [[nodiscard]] std::int64_t chunks() const noexcept;
  [[nodiscard]] PositionRange chunk(std::int64_t index) const;

  LayoutKind kind_;
  std::int64_t length_;
  int ranks_;
  std::int64_t granule_;
  std::optional<Assignment> assignment_;  // only if balanced
};

/// How one dimension is divided among the ranks along its axes. Plain data.
///
/// | kind     | ranks A, size n           | rank t holds                                      |
/// |----------|---------------------------|---------------------------------------------------|
/// | block    | A divides n               | the t-th block of n/A                             |
/// | sequence | any, even n < A           | as SequenceLayout(layout, n, A, granule) says     |
/// | assigned | the assignment's          | the positions that the assignment gives rank t    |
/// | kv_heads | A divides n, or n ≥ 1     | the t-th block of n/A, or                         |
/// |          | divides A                 | the one head t·n/A, shared by A/n ranks           |
///
/// kv_heads is for key/value heads on the axes of query heads that are divided in blocks: each rank
/// holds exactly the key/value heads that its query heads read.
class Distribution {
 public:
  enum class Kind : std::uint8_t { block, sequence, assigned, kv_heads };

  /// Blocks.
  Distribution() = default;
  static Distribution block() { return {}; }
  /// Throws ArgumentError for a granule below 1, or above 1 if striped, and for balanced.
  static Distribution sequence(LayoutKind layout = LayoutKind::contiguous,
                               std::int64_t granule = 1);
  static Distribution assigned(Assignment assignment);
  static Distribution kv_heads();

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// Meaningful for sequences; `balanced` for an assignment.
  [[nodiscard]] LayoutKind layout() const noexcept { return layout_; }
  /// Meaningful for sequences other than assignments.
  [[nodiscard]] std::int64_t granule() const noexcept { return granule_; }

  /// Null unless kind() is assigned.
  [[nodiscard]] const Assignment* assignment() const noexcept {
    return assignment_ ? &*assignment_ : nullptr;
  }

  /// True if `size` entries can be divided among `ranks` ranks in this way.
  [[nodiscard]] bool fits(std::int64_t size, int ranks) const noexcept;
  /// The entries that rank `coordinate` holds of `size` entries on `ranks` ranks. Requires
  /// fits(size, ranks).
  [[nodiscard]] PositionRanges positions(std::int64_t size, int ranks, int coordinate) const;
  /// The number of neighbouring ranks that hold the same entries: 1, except for shared key/value
  /// heads.
  [[nodiscard]] int copies(std::int64_t size, int ranks) const noexcept;

  bool operator==(const Distribution&) const = default;

 private:
  Kind kind_ = Kind::block;
  LayoutKind layout_ = LayoutKind::contiguous;
  std::int64_t granule_ = 1;
  std::optional<Assignment> assignment_;
};

/// "block", "zigzag", "zigzag:128" (with a granule), "kv_heads"; "balanced:7f3a20c1", with the
/// first digits of the assignment's digest.
[[nodiscard]] std::string to_string(const Distribution& distribution);

}  // namespace annulus
