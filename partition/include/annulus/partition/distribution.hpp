#pragma once

#include <cstdint>
#include <string>

#include <annulus/partition/position.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {

/// How one dimension is dealt out to the ranks along its axes. Plain data.
///
/// | kind     | ranks A, size n           | rank t holds                                      |
/// |----------|---------------------------|---------------------------------------------------|
/// | block    | A divides n               | the t-th block of n/A                             |
/// | sequence | any, even n < A           | what SequenceLayout(layout, n, A, granule) says   |
/// | kv_heads | A divides n, or n ≥ 1     | the t-th block of n/A, or                         |
/// |          | divides A                 | the one head t·n/A, shared by A/n ranks           |
///
/// kv_heads fits query heads that are blocks on the same axes: each rank holds just the key/value
/// heads that its query heads read.
class Distribution {
 public:
  enum class Kind : std::uint8_t { block, sequence, kv_heads };

  /// Blocks.
  Distribution() = default;
  static Distribution block() { return {}; }
  /// Throws ArgumentError for a granule below 1.
  static Distribution sequence(LayoutKind layout = LayoutKind::contiguous,
                               std::int64_t granule = 1);
  static Distribution kv_heads();

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// Of a sequence.
  [[nodiscard]] LayoutKind layout() const noexcept { return layout_; }
  [[nodiscard]] std::int64_t granule() const noexcept { return granule_; }

  /// Whether `size` entries can be dealt out to `ranks` ranks.
  [[nodiscard]] bool fits(std::int64_t size, int ranks) const noexcept;
  /// What rank `coordinate` of `ranks` holds of `size` entries. Only if fits(size, ranks).
  [[nodiscard]] PositionRanges positions(std::int64_t size, int ranks, int coordinate) const;
  /// How many neighbouring ranks hold the same entries: 1 except for shared kv heads.
  [[nodiscard]] int copies(std::int64_t size, int ranks) const noexcept;

  bool operator==(const Distribution&) const = default;

 private:
  Kind kind_ = Kind::block;
  LayoutKind layout_ = LayoutKind::contiguous;
  std::int64_t granule_ = 1;
};

/// "block", "zigzag", "zigzag:128" (with a granule), "kv_heads".
[[nodiscard]] std::string to_string(const Distribution& distribution);

}  // namespace annulus
