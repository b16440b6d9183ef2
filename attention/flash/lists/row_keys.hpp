#pragma once

#include <cstdint>

#include <annulus/attention/position_rule.hpp>

#include "flash/work.hpp"

// The keys of rows, where one band does not say them: see RowKeys. From row to row, both ends of
// both intervals stay or rise (an opening that has begun stays). So the first and the last of some
// rows of one rule say what any of them sees, and all.
namespace annulus::flash {

ANNULUS_HOST_DEVICE inline Document common(const Document& a, const Document& b) {
  return {a.begin < b.begin ? b.begin : a.begin, a.end < b.end ? a.end : b.end};
}

/// By position alone. The row's position is below 2^28; ends beyond every position are kFar.
[[nodiscard]] ANNULUS_HOST_DEVICE inline RowKeys row_keys(const PositionRule& rule,
                                                          std::int64_t row) {
  const auto narrow = [](std::int64_t key) {
    return static_cast<std::int32_t>(key < KeySegment::kFar ? key : KeySegment::kFar);
  };
  const KeySpans keys = rule.keys_of(row);
  if (keys.begin > keys.opening) {
    return {{narrow(keys.begin), narrow(keys.end)}, {0, narrow(keys.opening)}};
  }
  return {{0, narrow(keys.end < keys.opening ? keys.opening : keys.end)}, {}};
}

[[nodiscard]] ANNULUS_HOST_DEVICE inline Document part_of(const RowKeys& keys, bool opening) {
  return opening ? keys.opening : keys.rest;
}

/// The keys that any of some rows sees, and the keys that all of them see.
struct KeyHull {
  Document any;
  Document all;
};

[[nodiscard]] ANNULUS_HOST_DEVICE inline KeyHull key_hull(const PositionRule& rule,
                                                          std::int64_t first_row,
                                                          std::int64_t last_row, bool opening) {
  const Document first = part_of(row_keys(rule, first_row), opening);
  const Document last = part_of(row_keys(rule, last_row), opening);
  return {{first.begin, last.end}, {last.begin, first.end}};
}

}  // namespace annulus::flash
