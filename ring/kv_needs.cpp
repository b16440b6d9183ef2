#include "kv_needs.hpp"

#include <algorithm>
#include <utility>

namespace annulus::ring {

KvNeeds::KvNeeds(const AttentionProblem& problem, const ShardedOperands& operands,
                 std::vector<int> group)
    : problem_(problem), operands_(operands), group_(std::move(group)) {}

const std::vector<ColumnPiece>& KvNeeds::of(int receiver, int origin) const {
  const std::int64_t key = static_cast<std::int64_t>(receiver) * size() + origin;
  const auto [entry, fresh] = known_.try_emplace(key);
  std::vector<ColumnPiece>& pieces = entry->second;
  if (!fresh) return pieces;

  const int rank = group_[static_cast<std::size_t>(receiver)];
  const PositionRanges batches = operands_.query.positions(rank, 0);
  if (batches.empty()) return pieces;
  const std::int64_t first_batch = batches.global(LocalPosition(0)).value();
  const PositionRanges rows = operands_.query.positions(rank, 1);
  const PositionRanges columns =
      operands_.key.positions(group_[static_cast<std::size_t>(origin)], 1);
  std::int64_t before = 0;
  for (const PositionRange& chunk : columns.ranges()) {
    std::int64_t begin = chunk.length;
    std::int64_t end = 0;
    for (const PositionRange& row_range : rows.ranges()) {
      const Visibility seen = problem_.mask.examine(first_batch, batches.size(), row_range, chunk);
      if (seen.empty()) continue;
      begin = std::min(begin, seen.columns.begin.value());
      end = std::max(end, seen.columns.end().value());
    }
    if (begin < end) {
      pieces.push_back(
          {{LocalPosition(before + begin), end - begin}, chunk.slice(begin, end - begin)});
    }
    before += chunk.length;
  }
  return pieces;
}

}  // namespace annulus::ring
