#include "schedules/building/kv_needs.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>

#include "schedules/building/gathering.hpp"

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

void join(std::vector<LocalRange>& runs, const std::vector<LocalRange>& more) {
  if (more.empty()) return;
  std::vector<LocalRange> all;
  std::merge(runs.begin(), runs.end(), more.begin(), more.end(), std::back_inserter(all),
             [](const LocalRange& a, const LocalRange& b) { return a.begin < b.begin; });
  runs.clear();
  for (const LocalRange& run : all) {
    if (runs.empty() || runs.back().end() < run.begin) {
      runs.push_back(run);
    } else {
      runs.back() = hull(runs.back(), run);
    }
  }
}

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

const KvNeeds& KvNeeds::of_neighbours(int count) const {
  std::unique_ptr<KvNeeds>& known = neighbours_[count];
  if (known) return *known;
  known = std::make_unique<KvNeeds>(problem_, size() / count, [this, count](int index) {
    const auto gathered = [&](PositionRanges HeldSequence::*sequence) {
      std::vector<PositionRanges> shards;
      for (int i = 0; i < count; ++i) shards.push_back(member(index * count + i).*sequence);
      return Gathering(shards).positions();
    };
    const HeldSequence& first = member(index * count);
    return HeldSequence{first.first_batch, first.batches, gathered(&HeldSequence::rows),
                        gathered(&HeldSequence::columns)};
  });
  return *known;
}

void KvNeeds::forget_some() {
  for (const auto& [count, needs] : neighbours_) needs->forget_some();
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

// A block of members is left out as soon as its rows are known to need nothing new. So under a
// causal mask or a window, one or two members decide for a block.
void KvNeeds::add_of_any(std::vector<LocalRange>& runs, int origin, int first, int count) const {
  while (count > 0) {
    int level = 0;
    while (first % (2 << level) == 0 && (2 << level) <= count) ++level;
    add_of_block(runs, origin, level, first >> level);
    first += 1 << level;
    count -= 1 << level;
  }
}

void KvNeeds::add_of_block(std::vector<LocalRange>& runs, int origin, int level, int index) const {
  if (!may_add(runs, origin, level, index)) return;
  if (level == 0) return join(runs, runs_of(of(index, origin)));
  add_of_block(runs, origin, level - 1, 2 * index);
  add_of_block(runs, origin, level - 1, 2 * index + 1);
}

// Hulls of the ranges of the same number; nothing if members have different numbers of ranges, or
// different batches.
const std::vector<PositionRange>& KvNeeds::row_hulls(int level, int index) const {
  const auto l = static_cast<std::size_t>(level);
  const auto i = static_cast<std::size_t>(index);
  if (hulls_.size() <= l) hulls_.resize(l + 1);
  if (hulls_[l].size() <= i) hulls_[l].resize(i + 1);
  if (hulls_[l][i]) return *hulls_[l][i];
  std::vector<PositionRange> made;
  if (level == 0) {
    made = member(index).rows.ranges();
  } else {
    made = row_hulls(level - 1, 2 * index);
    const std::vector<PositionRange>& more = row_hulls(level - 1, 2 * index + 1);
    const HeldSequence& a = member(index << level);
    const HeldSequence& b = member((2 * index + 1) << (level - 1));
    const bool alike = a.first_batch == b.first_batch && a.batches == b.batches;
    if (!alike || made.size() != more.size()) made.clear();
    for (std::size_t r = 0; r < made.size(); ++r) {
      const GlobalPosition begin = std::min(made[r].start, more[r].start);
      made[r] = {begin, std::max(made[r].last(), more[r].last()) - begin + 1, 1};
    }
  }
  return hulls_[l][i].emplace(std::move(made));
}

// False only if it is certain that all members of a block need nothing beyond `runs`.
bool KvNeeds::may_add(const std::vector<LocalRange>& runs, int origin, int level, int index) const {
  const HeldSequence& theirs = member(origin);
  if (!runs.empty() && runs.front().count == theirs.columns.size()) return false;
  const std::vector<PositionRange>& chunks = theirs.columns.ranges();
  const std::vector<PositionRange>& rows = row_hulls(level, index);
  // Beyond that, of() fills gaps.
  if (rows.empty() || chunks.size() > kMaximumMessages) return true;
  const HeldSequence& any = member(index << level);
  LocalPosition before(0);
  for (const PositionRange& chunk : chunks) {
    std::optional<LocalRange> columns;  // of() takes one hull per chunk
    for (const PositionRange& range : rows) {
      const Visibility seen = problem_.mask.examine(any.first_batch, any.batches, range, chunk);
      if (!seen.exact) return true;
      if (seen.empty()) continue;
      const LocalRange some{before + seen.columns.begin.value(), seen.columns.count};
      columns = columns ? hull(*columns, some) : some;
    }
    const auto has_them = [&](const LocalRange& run) {
      return run.begin <= columns->begin && columns->end() <= run.end();
    };
    if (columns && std::ranges::none_of(runs, has_them)) return true;
    before = before + chunk.length;
  }
  return false;
}

}  // namespace annulus::ring
