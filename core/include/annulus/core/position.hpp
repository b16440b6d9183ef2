#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Positions along one dimension of a sharded array.
///
/// | from                        | to                  | by                                   |
/// |-----------------------------|---------------------|--------------------------------------|
/// | LocalPosition (of a shard)  | GlobalPosition      | PositionRanges::global(local)        |
/// | GlobalPosition              | LocalPosition       | PositionRanges::local(global)        |
/// | GlobalPosition              | rank on the axis    | SequenceLayout::owner(global)        |
/// | rank on the axis            | PositionRanges      | SequenceLayout::positions(rank)      |
/// | LocalRange (of a shard)     | PositionRanges      | PositionRanges::slice(range)         |
///
/// The two position types do not convert implicitly, neither into each other nor into integers.
namespace annulus {

template <class Tag>
class StrongPosition {
 public:
  constexpr StrongPosition() = default;
  constexpr explicit StrongPosition(std::int64_t value) : value_(value) {}
  [[nodiscard]] constexpr std::int64_t value() const noexcept { return value_; }
  constexpr auto operator<=>(const StrongPosition&) const =
      default;  // NOLINT(modernize-use-nullptr)
  friend constexpr StrongPosition operator+(StrongPosition a, std::int64_t n) {
    return StrongPosition(a.value_ + n);
  }
  friend constexpr StrongPosition operator-(StrongPosition a, std::int64_t n) {
    return StrongPosition(a.value_ - n);
  }
  /// The distance between two positions of the same kind.
  friend constexpr std::int64_t operator-(StrongPosition a, StrongPosition b) {
    return a.value_ - b.value_;
  }

 private:
  std::int64_t value_ = 0;
};

/// An index into the whole, unsharded dimension.
using GlobalPosition = StrongPosition<struct GlobalPositionTag>;
/// An index into one rank's shard of the dimension.
using LocalPosition = StrongPosition<struct LocalPositionTag>;

/// Local positions [begin, begin + count).
struct LocalRange {
  LocalPosition begin;
  std::int64_t count = 0;
  [[nodiscard]] LocalPosition end() const { return begin + count; }
  bool operator==(const LocalRange&) const = default;
};

/// The smallest range that contains both.
[[nodiscard]] LocalRange hull(const LocalRange& a, const LocalRange& b);

/// The `length` global positions start, start + stride, …; the stride is at least 1.
struct PositionRange {
  GlobalPosition start;
  std::int64_t length = 0;
  std::int64_t stride = 1;

  [[nodiscard]] GlobalPosition at(std::int64_t i) const { return start + i * stride; }
  /// Requires length > 0.
  [[nodiscard]] GlobalPosition last() const { return at(length - 1); }
  /// Entries [begin, begin + count) of this range.
  [[nodiscard]] PositionRange slice(std::int64_t begin, std::int64_t count) const {
    return {at(begin), count, stride};
  }
  /// The number of entries below `bound`.
  [[nodiscard]] std::int64_t count_below(GlobalPosition bound) const;
  /// Indices of the entries in [low, high). They are consecutive, because the entries are sorted.
  [[nodiscard]] LocalRange indices_within(GlobalPosition low, GlobalPosition high) const;
  bool operator==(const PositionRange&) const = default;
};

/// The global positions that one shard holds of a dimension, in local order, as a short list of
/// ranges. Local position 0 is the first entry of the first range. No range is empty, and no two
/// ranges share a position.
class PositionRanges {
 public:
  PositionRanges() = default;
  explicit PositionRanges(std::vector<PositionRange> ranges);
  /// Positions [0, size): an unsharded dimension.
  static PositionRanges all(std::int64_t size);

  [[nodiscard]] std::int64_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] const std::vector<PositionRange>& ranges() const& noexcept { return ranges_; }
  /// Returns a value on a temporary, so that `for (… : layout.positions(rank).ranges())` is safe.
  [[nodiscard]] std::vector<PositionRange> ranges() && noexcept { return std::move(ranges_); }

  [[nodiscard]] GlobalPosition global(LocalPosition local) const;
  [[nodiscard]] std::optional<LocalPosition> local(GlobalPosition global) const;
  /// The global positions of consecutive local ones.
  [[nodiscard]] PositionRanges slice(LocalRange range) const;
  bool operator==(const PositionRanges& other) const { return ranges_ == other.ranges_; }

 private:
  std::vector<PositionRange> ranges_;
  std::int64_t size_ = 0;
};

/// "0:16", "3:16:4" (start:end:stride), joined by "+"; "-" when empty.
[[nodiscard]] std::string to_string(const PositionRanges& ranges);

/// Positions that two shards share, and their local positions in both.
struct CommonRange {
  PositionRange global;         ///< the shared positions
  LocalPosition first;          ///< local position of global.start in the first shard …
  std::int64_t first_step = 1;  ///< … and the local distance between neighbours there
  LocalPosition second;         ///< likewise in the second shard
  std::int64_t second_step = 1;
};

/// The positions that both shards hold, in ascending order within each pair of ranges.
[[nodiscard]] std::vector<CommonRange> intersect(const PositionRanges& first,
                                                 const PositionRanges& second);

}  // namespace annulus
