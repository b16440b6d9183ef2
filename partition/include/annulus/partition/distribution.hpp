#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <annulus/core/position.hpp>
#include <annulus/partition/assignment.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {

/// How one dimension is divided among the ranks along its axes. Plain data.
///
/// | kind     | ranks A, size n           | rank t holds                                      |
/// |----------|---------------------------|---------------------------------------------------|
/// | block    | A divides n               | the t-th block of n/A                             |
/// | sequence | any, even n < A           | those of SequenceLayout(layout, n, A, granule)    |
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
