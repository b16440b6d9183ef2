#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <annulus/core/position.hpp>
#include <annulus/partition/assignment.hpp>

namespace annulus {

/// How a sequence is divided among the P ranks of its axes (docs/semantics.md §4).
enum class LayoutKind : std::uint8_t {
  contiguous,  ///< rank r holds chunk r of P
  zigzag,      ///< rank r holds chunks r and 2P−1−r of 2P: equal causal work
  striped,     ///< rank r holds positions r, r+P, r+2P, …
  balanced     ///< rank r holds the positions of an Assignment: equal work under a mask
};

[[nodiscard]] std::string_view name_of(LayoutKind kind) noexcept;
/// Throws ArgumentError("sequence layout", …) for an unknown name.
[[nodiscard]] LayoutKind parse_layout(std::string_view name);

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

}  // namespace annulus
