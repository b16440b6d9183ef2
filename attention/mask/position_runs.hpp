#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <annulus/attention/mask.hpp>
#include <annulus/core/position.hpp>

namespace annulus {

/// Positions with a common stride that lie side by side in a block, from local index `first` on.
struct PositionRun {
  PositionRange range;
  std::int64_t first = 0;

  [[nodiscard]] std::int64_t last() const { return first + range.length - 1; }
  [[nodiscard]] std::int64_t end() const { return first + range.length; }
  /// Entries [begin, begin + count) of the run.
  [[nodiscard]] PositionRun slice(std::int64_t begin, std::int64_t count) const {
    return {range.slice(begin, count), first + begin};
  }
};

using PositionRuns = std::vector<PositionRun>;

/// The ranges as runs. Neighbouring ranges that go on where the last one ended are joined.
inline PositionRuns runs_of(const PositionRanges& positions) {
  PositionRuns runs;
  std::int64_t first = 0;
  for (const PositionRange& range : positions.ranges()) {
    const std::int64_t index = std::exchange(first, first + range.length);
    if (!runs.empty()) {
      PositionRange& last = runs.back().range;
      const std::int64_t step = range.start - last.last();
      const bool fits =
          (last.length == 1 || last.stride == step) && (range.length == 1 || range.stride == step);
      if (fits && step > 0) {
        last.stride = step;
        last.length += range.length;
        continue;
      }
    }
    runs.push_back({range, index});
  }
  return runs;
}

/// The limit of to − from in local indices that is equivalent to a limit of their positions, if
/// there is one. For two runs, either all distances are within the limit, or none is, or the local
/// limit is known.
class LocalLimit {
 public:
  explicit LocalLimit(std::int64_t limit) : limit_(limit) {}

  void add(const PositionRun& from, const PositionRun& to) {
    if (to.range.last() - from.range.start <= limit_) {
      least_ = std::max(least_, to.last() - from.first);
    } else if (to.range.start - from.range.last() > limit_) {
      most_ = std::min(most_, to.first - from.last() - 1);
    } else if (from.range.length == 1 || to.range.length == 1 ||
               from.range.stride == to.range.stride) {
      const std::int64_t stride = from.range.length == 1 ? to.range.stride : from.range.stride;
      const std::int64_t ahead = limit_ - (to.range.start - from.range.start);
      const std::int64_t steps = ahead / stride - (ahead % stride < 0 ? 1 : 0);
      least_ = std::max(least_, to.first - from.first + steps);
      most_ = std::min(most_, to.first - from.first + steps);
    } else {
      known_ = false;
    }
  }
  [[nodiscard]] bool exists() const { return known_ && least_ <= most_; }
  /// Only if it exists.
  [[nodiscard]] std::int64_t value() const { return most_; }

 private:
  std::int64_t limit_;
  std::int64_t least_ = -Band::kUnlimited;
  std::int64_t most_ = Band::kUnlimited;
  bool known_ = true;
};

/// A mask's band in local indices, grown run by run.
class LocalBand {
 public:
  explicit LocalBand(const Band& global) : high_(global.high), low_(-global.low) {}

  void add(const PositionRun& rows, const PositionRun& columns) {
    high_.add(rows, columns);
    low_.add(columns, rows);
  }
  [[nodiscard]] bool straight() const { return high_.exists() && low_.exists(); }
  /// Only if it is straight. A side that hides nothing is unlimited.
  [[nodiscard]] Band band() const { return {-low_.value(), high_.value()}; }

 private:
  LocalLimit high_;
  LocalLimit low_;
};

}  // namespace annulus
