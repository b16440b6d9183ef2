#include "kv_needs.hpp"

#include <algorithm>
#include <utility>

namespace annulus::ring {

KvNeeds::KvNeeds(const AttentionProblem& problem, const ShardedOperands& operands,
                 std::vector<int> group)
    : problem_(problem), operands_(operands), group_(std::move(group)), shards_(group_.size()) {}

const KvNeeds::Shard& KvNeeds::shard(int group_rank) const {
  Shard& shard = shards_[static_cast<std::size_t>(group_rank)];
  if (shard.known) return shard;
  const int rank = group_[static_cast<std::size_t>(group_rank)];
  const PositionRanges batches = operands_.query.positions(rank, 0);
  if (!batches.empty()) shard.first_batch = batches.global(LocalPosition(0)).value();
  shard.batches = batches.size();
  shard.rows = operands_.query.positions(rank, 1);
  shard.columns = operands_.key.positions(rank, 1);
  shard.known = true;
  return shard;
}

const std::vector<ColumnPiece>& KvNeeds::of(int receiver, int origin) const {
  const std::int64_t key = static_cast<std::int64_t>(receiver) * size() + origin;
  const auto [entry, fresh] = known_.try_emplace(key);
  std::vector<ColumnPiece>& pieces = entry->second;
  if (!fresh) return pieces;

  const Shard& mine = shard(receiver);
  if (mine.batches == 0) return pieces;
  std::int64_t before = 0;
  for (const PositionRange& chunk : shard(origin).columns.ranges()) {
    std::int64_t begin = chunk.length;
    std::int64_t end = 0;
    for (const PositionRange& row_range : mine.rows.ranges()) {
      const Visibility seen =
          problem_.mask.examine(mine.first_batch, mine.batches, row_range, chunk);
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
