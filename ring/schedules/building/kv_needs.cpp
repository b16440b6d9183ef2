#include "schedules/building/kv_needs.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace annulus::ring {

namespace {

// Cuts runs of local columns into pieces, one for each chunk that they touch.
std::vector<ColumnPiece> cut(const std::vector<LocalRange>& runs, const PositionRanges& columns) {
  std::vector<ColumnPiece> pieces;
  auto run = runs.begin();
  LocalPosition first(0);
  for (const PositionRange& chunk : columns.ranges()) {
    const LocalPosition end = first + chunk.length;
    for (; run != runs.end() && run->begin < end; ++run) {
      const LocalPosition from = std::max(run->begin, first);
      const LocalPosition to = std::min(run->end(), end);
      pieces.push_back({{from, to - from}, chunk.slice(from - first, to - from)});
      if (run->end() > end) break;
    }
    first = end;
  }
  return pieces;
}

// Fills the narrowest gaps until there are no more than `most` runs.
void fill_gaps(std::vector<LocalRange>& runs, std::size_t most) {
  if (runs.size() <= most) return;
  std::vector<std::size_t> gaps(runs.size() - 1);  // by the run after them
  std::iota(gaps.begin(), gaps.end(), std::size_t{1});
  const auto width = [&](std::size_t i) { return runs[i].begin - runs[i - 1].end(); };
  std::stable_sort(gaps.begin(), gaps.end(),
                   [&](std::size_t a, std::size_t b) { return width(a) < width(b); });
  std::vector<bool> filled(runs.size());
  for (std::size_t i = 0; i < runs.size() - most; ++i) filled[gaps[i]] = true;
  std::vector<LocalRange> fewer;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (filled[i]) {
      fewer.back().count = runs[i].end() - fewer.back().begin;
    } else {
      fewer.push_back(runs[i]);
    }
  }
  runs = std::move(fewer);
}

}  // namespace

std::vector<std::vector<ColumnPiece>> joined(std::span<const ColumnPiece> pieces) {
  std::vector<std::vector<ColumnPiece>> result;
  for (const ColumnPiece& piece : pieces) {
    if (result.empty() || result.back().back().columns.end() != piece.columns.begin) {
      result.emplace_back();
    }
    result.back().push_back(piece);
  }
  return result;
}

std::vector<LocalRange> runs_of(std::span<const ColumnPiece> pieces) {
  std::vector<LocalRange> runs;
  for (const ColumnPiece& piece : pieces) {
    if (runs.empty() || runs.back().end() != piece.columns.begin) {
      runs.push_back(piece.columns);
    } else {
      runs.back().count += piece.columns.count;
    }
  }
  return runs;
}

HeldSequence held_by(const ShardedOperands& operands, int rank) {
  const PositionRanges batches = operands.query.positions(rank, 0);
  return {batches.empty() ? 0 : batches.global(LocalPosition(0)).value(), batches.size(),
          operands.query.positions(rank, 1), operands.key.positions(rank, 1)};
}

KvNeeds::KvNeeds(const AttentionProblem& problem, int members,
                 std::function<HeldSequence(int)> held)
    : problem_(problem), held_(std::move(held)), members_(static_cast<std::size_t>(members)) {}

const HeldSequence& KvNeeds::member(int index) const {
  std::optional<HeldSequence>& member = members_[static_cast<std::size_t>(index)];
  if (!member) member = held_(index);
  return *member;
}

void KvNeeds::forget_some() {
  constexpr std::size_t kMaximumPairs = std::size_t{1} << 16;
  if (known_->size() <= kMaximumPairs) return;
  known_.reset();
  memory_.release();
  known_.emplace(&memory_);
}

std::span<const ColumnPiece> KvNeeds::of(int receiver, int origin) const {
  const auto [known, fresh] = known_->try_emplace(
      static_cast<std::size_t>(receiver) * members_.size() + static_cast<std::size_t>(origin));
  std::pmr::vector<ColumnPiece>& pieces = known->second;
  if (!fresh) return pieces;

  const HeldSequence& mine = member(receiver);
  if (mine.batches == 0) return pieces;
  std::int64_t before = 0;
  for (const PositionRange& chunk : member(origin).columns.ranges()) {
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
  std::vector<LocalRange> runs = runs_of(pieces);
  if (runs.size() <= kMaximumMessages) return pieces;
  fill_gaps(runs, kMaximumMessages);
  const std::vector<ColumnPiece> fewer = cut(runs, member(origin).columns);
  pieces.assign(fewer.begin(), fewer.end());
  return pieces;
}

}  // namespace annulus::ring
