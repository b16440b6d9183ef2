#include "schedules/building/refusals.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

namespace annulus::ring {
namespace {

std::int64_t begin_of(const PositionRanges& positions) {
  return positions.empty() ? 0 : positions.ranges().front().start.value();
}

PositionRanges moved(const PositionRanges& positions, std::int64_t by) {
  std::vector<PositionRange> ranges = positions.ranges();
  for (PositionRange& range : ranges) range.start = range.start + by;
  return PositionRanges(std::move(ranges));
}

// True if the mask is at most causal and a window: only distances between positions count.
bool is_band(const Mask& mask) {
  return mask.one_band() && !mask.depends_on_batch() && !mask.block_mask();
}

std::string key_of(const Refusal& refusal) {
  return fmt::format("{} {} {} {}:{} {} {} {}", refusal.implementation, to_string(refusal.rows),
                     to_string(refusal.columns), refusal.batches.begin, refusal.batches.count,
                     refusal.heads, refusal.full, refusal.rounding);
}

void add_classes(std::vector<Refusal>& known, const AttentionProblem& problem,
                 std::vector<Refusal> more) {
  std::unordered_set<std::string> keys;
  for (const Refusal& refusal : known) keys.insert(key_of(refusal));
  for (Refusal& refusal : more) {
    Refusal one = class_of(problem, std::move(refusal));
    if (keys.insert(key_of(one)).second) known.push_back(std::move(one));
  }
}

}  // namespace

// A rank's own columns lie in the caller's tensors, other columns in buffers with other strides.
Refusal class_of(const AttentionProblem& problem, Refusal refusal) {
  if (!refusal.full && !is_band(problem.mask)) return refusal;
  const std::int64_t rows = begin_of(refusal.rows);
  const std::int64_t columns = begin_of(refusal.columns);
  const std::int64_t distance = refusal.full ? std::int64_t{rows != columns} : columns - rows;
  const std::int64_t first = std::max<std::int64_t>(-distance, 0);
  refusal.rows = moved(refusal.rows, first - rows);
  refusal.columns = moved(refusal.columns, first + distance - columns);
  refusal.batches.begin = 0;
  return refusal;
}

void refuse(PlanInput& input, std::vector<Refusal> refusals) {
  add_classes(input.refusals, input.problem, std::move(refusals));
}

std::vector<Refusal> refusals_of_all(Control& ranks, const AttentionProblem& problem,
                                     const std::vector<Refusal>& refusals) {
  std::vector<Refusal> mine;
  add_classes(mine, problem, refusals);
  const auto add = [&](std::string& whole, const std::string& later) {
    if (later.empty()) return;
    std::vector<Refusal> all = whole.empty() ? std::vector<Refusal>() : parse_refusals(whole);
    add_classes(all, problem, parse_refusals(later));
    whole = to_json(all);
  };
  const std::string all =
      ranks.merge_text(mine.empty() ? std::string() : to_json(mine), add, "refusals");
  return all.empty() ? std::vector<Refusal>() : parse_refusals(all);
}

}  // namespace annulus::ring
