#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/position.hpp>

namespace annulus {

LocalRange hull(const LocalRange& a, const LocalRange& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const LocalPosition begin = std::min(a.begin, b.begin);
  return {begin, std::max(a.end(), b.end()) - begin};
}

std::int64_t PositionRange::count_below(GlobalPosition bound) const {
  if (bound <= start) return 0;
  return std::min(length, (bound - start - 1) / stride + 1);
}

LocalRange PositionRange::indices_within(GlobalPosition low, GlobalPosition high) const {
  const std::int64_t begin = count_below(low);
  return {LocalPosition(begin), std::max<std::int64_t>(0, count_below(high) - begin)};
}

PositionRanges::PositionRanges(std::vector<PositionRange> ranges) : ranges_(std::move(ranges)) {
  std::erase_if(ranges_, [](const PositionRange& range) { return range.length == 0; });
  for (const PositionRange& range : ranges_) size_ += range.length;
}

PositionRanges PositionRanges::all(std::int64_t size) {
  return PositionRanges({{GlobalPosition(0), size, 1}});
}

GlobalPosition PositionRanges::global(LocalPosition local) const {
  std::int64_t index = local.value();
  if (index >= 0) {
    for (const PositionRange& range : ranges_) {
      if (index < range.length) return range.at(index);
      index -= range.length;
    }
  }
  throw InternalError(
      fmt::format("local position {} of a shard of {} entries", local.value(), size_));
}

std::optional<LocalPosition> PositionRanges::local(GlobalPosition global) const {
  std::int64_t before = 0;
  for (const PositionRange& range : ranges_) {
    const std::int64_t offset = global - range.start;
    if (offset >= 0 && offset % range.stride == 0 && offset / range.stride < range.length) {
      return LocalPosition(before + offset / range.stride);
    }
    before += range.length;
  }
  return std::nullopt;
}

PositionRanges PositionRanges::slice(LocalRange range) const {
  std::vector<PositionRange> pieces;
  std::int64_t before = 0;
  for (const PositionRange& held : ranges_) {
    const std::int64_t begin = std::max(range.begin.value() - before, std::int64_t{0});
    const std::int64_t end = std::min(range.end().value() - before, held.length);
    if (begin < end) pieces.push_back(held.slice(begin, end - begin));
    before += held.length;
  }
  return PositionRanges(std::move(pieces));
}

std::string to_string(const PositionRanges& ranges) {
  if (ranges.empty()) return "-";
  std::string text;
  for (const PositionRange& range : ranges.ranges()) {
    if (!text.empty()) text += '+';
    text += fmt::format("{}:{}", range.start.value(), range.last().value() + 1);
    if (range.stride != 1) text += fmt::format(":{}", range.stride);
  }
  return text;
}

namespace {

// The solutions of x ≡ a.start (mod a.stride), x ≡ b.start (mod b.stride) within both ranges.
PositionRange common(const PositionRange& a, const PositionRange& b) {
  const std::int64_t divisor = std::gcd(a.stride, b.stride);
  const std::int64_t distance = b.start - a.start;
  if (distance % divisor != 0) return {};
  const std::int64_t step = a.stride / divisor * b.stride;
  // Smallest i ≥ 0 with a.at(i) ≡ b.start (mod b.stride); strides are small, so try them in turn.
  std::int64_t i = 0;
  while ((a.at(i) - b.start) % b.stride != 0) ++i;
  const GlobalPosition low = std::max(a.start, b.start);
  GlobalPosition first = a.at(i);
  if (first < low) first = first + round_up(low - first, step);
  const GlobalPosition high = std::min(a.last(), b.last());
  if (first > high) return {};
  return {first, (high - first) / step + 1, step};
}

}  // namespace

std::vector<CommonRange> intersect(const PositionRanges& first, const PositionRanges& second) {
  std::vector<CommonRange> result;
  std::int64_t before_a = 0;
  for (const PositionRange& a : first.ranges()) {
    std::int64_t before_b = 0;
    for (const PositionRange& b : second.ranges()) {
      if (const PositionRange shared = common(a, b); shared.length > 0) {
        result.push_back({shared, LocalPosition(before_a + (shared.start - a.start) / a.stride),
                          shared.stride / a.stride,
                          LocalPosition(before_b + (shared.start - b.start) / b.stride),
                          shared.stride / b.stride});
      }
      before_b += b.length;
    }
    before_a += a.length;
  }
  return result;
}

}  // namespace annulus
