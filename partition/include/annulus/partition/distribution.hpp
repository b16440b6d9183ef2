#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <annulus/partition/dealing.hpp>
#include <annulus/partition/position.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {

/// How one dimension is divided among the ranks along its axes. Plain data.
///
/// | kind     | ranks A, size n           | rank t holds                                      |
/// |----------|---------------------------|---------------------------------------------------|
/// | block    | A divides n               | the t-th block of n/A                             |
/// | sequence | any, even n < A           | what SequenceLayout(layout, n, A, granule) says   |
/// | dealt    | those of the dealing      | what the dealing gives rank t                     |
/// | kv_heads | A divides n, or n ≥ 1     | the t-th block of n/A, or                         |
/// |          | divides A                 | the one head t·n/A, shared by A/n ranks           |
///
/// kv_heads is for key/value heads on the axes of query heads that are divided in blocks: each rank
/// holds exactly the key/value heads that its query heads read.
class Distribution {
 public:
  enum class Kind : std::uint8_t { block, sequence, dealt, kv_heads };

  /// Blocks.
  Distribution() = default;
  static Distribution block() { return {}; }
  /// Throws ArgumentError for a granule below 1, or above 1 if striped, and for balanced.
  static Distribution sequence(LayoutKind layout = LayoutKind::contiguous,
                               std::int64_t granule = 1);
  static Distribution dealt(Dealing dealing);
  static Distribution kv_heads();

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// Meaningful for sequences; `balanced` for a dealing.
  [[nodiscard]] LayoutKind layout() const noexcept { return layout_; }
  /// Meaningful for sequences other than dealings.
  [[nodiscard]] std::int64_t granule() const noexcept { return granule_; }

  /// Null unless kind() is dealt.
  [[nodiscard]] const Dealing* dealing() const noexcept { return dealing_ ? &*dealing_ : nullptr; }

  /// Whether `size` entries can be divided among `ranks` ranks in this way.
  [[nodiscard]] bool fits(std::int64_t size, int ranks) const noexcept;
  /// The entries, of `size`, that rank `coordinate` of `ranks` holds. Requires fits(size, ranks).
  [[nodiscard]] PositionRanges positions(std::int64_t size, int ranks, int coordinate) const;
  /// How many neighbouring ranks hold the same entries: 1, except for shared key/value heads.
  [[nodiscard]] int copies(std::int64_t size, int ranks) const noexcept;

  bool operator==(const Distribution&) const = default;

 private:
  Kind kind_ = Kind::block;
  LayoutKind layout_ = LayoutKind::contiguous;
  std::int64_t granule_ = 1;
  std::optional<Dealing> dealing_;
};

/// "block", "zigzag", "zigzag:128" (with a granule), "kv_heads"; "balanced:7f3a20c1", with the
/// first digits of the dealing's digest.
[[nodiscard]] std::string to_string(const Distribution& distribution);

}  // namespace annulus
