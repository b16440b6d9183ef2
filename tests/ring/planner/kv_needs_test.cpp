// KvNeeds finds what consecutive members need of an owner; each member's own needs are the
// reference.
#include "schedules/building/kv_needs.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

template <class Values>
auto any(std::mt19937& random, const Values& values) {
  return values[std::uniform_int_distribution<std::size_t>(0, std::size(values) - 1)(random)];
}

AttentionProblem random_problem(std::mt19937& random, int ranks) {
  const std::int64_t length = ranks * any(random, std::vector<std::int64_t>{2, 6, 32});
  AttentionProblem problem = causal_problem(length);
  problem.mask.set_causal(any(random, std::vector{true, true, false}));
  const int kind = any(random, std::vector{0, 0, 1, 2});
  if (kind == 1) {
    problem.mask.set_window(any(random, std::vector{3, 40, 200}), any(random, std::vector{-1, 5}));
  }
  if (kind == 2) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(length));
    std::int32_t id = 0;
    for (std::int32_t& one : ids) one = random() % 20 == 0 ? ++id : id;
    problem.mask.set_segments(1, ids, ids);
  }
  return problem;
}

bool have_column(const std::vector<LocalRange>& runs, LocalPosition column) {
  return std::ranges::any_of(
      runs, [&](const LocalRange& run) { return run.begin <= column && column < run.end(); });
}

void expect_needs_of_each(const KvNeeds& needs, const ShardedOperands& operands, int origin,
                          int first, int count) {
  std::vector<LocalRange> runs;
  needs.add_of_any(runs, origin, first, count);
  for (std::size_t r = 1; r < runs.size(); ++r) EXPECT_GT(runs[r].begin, runs[r - 1].end());
  for (std::int64_t c = 0; c < operands.key.local_shape(origin)[1]; ++c) {
    bool needed = false;
    for (int member = first; member < first + count; ++member) {
      needed = needed || have_column(runs_of(needs.of(member, origin)), LocalPosition(c));
    }
    ASSERT_EQ(have_column(runs, LocalPosition(c)), needed)
        << "column " << c << " of " << origin << ", members " << first << " + " << count;
  }
}

TEST(KvNeeds, OfAnyMemberIsWhatEachOfThemNeeds) {
  std::mt19937 random(26);
  for (int i = 0; i < 300; ++i) {
    const int ranks = any(random, std::vector{2, 3, 8, 13, 32});
    const AttentionProblem problem = random_problem(random, ranks);
    const LayoutKind layout =
        any(random, std::vector{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped});
    const ShardedOperands operands = sequence_operands(problem, ranks, layout);
    const KvNeeds needs(problem, ranks, [&](int member) { return held_by(operands, member); });
    const int origin = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const int first = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const int count = static_cast<int>(random() % static_cast<unsigned>(ranks - first + 1));
    SCOPED_TRACE(std::to_string(i) + " " + to_string(problem.mask) + " " +
                 std::string(name_of(layout)) + " " + std::to_string(ranks));
    expect_needs_of_each(needs, operands, origin, first, count);
  }
}

// Rows of a zigzag shard lie in two ranges. A member that sees one document with each needs the
// columns between, too, of which neither range sees any.
TEST(KvNeeds, AHullOfTwoRangesHasColumnsThatNeitherSees) {
  AttentionProblem problem = unmasked_problem(32);
  const std::vector<std::int32_t> ids =
      segments_from_cu_seqlens(std::vector<std::int32_t>{0, 9, 11, 28, 32}, 32);
  problem.mask.set_segments(1, ids, ids);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  const KvNeeds needs(problem, 4, [&](int member) { return held_by(operands, member); });
  // In the order of a ring, in which the sum passes members 3, 0 and 1.
  std::vector<LocalRange> passed;
  needs.add_of_any(passed, 2, 3, 1);
  needs.add_of_any(passed, 2, 0, 1);
  needs.add_of_any(passed, 2, 1, 1);
  std::vector<LocalRange> all;
  for (const int member : {3, 0, 1}) join(all, runs_of(needs.of(member, 2)));
  for (std::int64_t c = 0; c < 8; ++c) {
    EXPECT_EQ(have_column(passed, LocalPosition(c)), have_column(all, LocalPosition(c))) << c;
  }
  for (int origin = 0; origin < 4; ++origin) {
    for (int first = 0; first < 4; ++first) {
      for (int count = 0; first + count <= 4; ++count) {
        expect_needs_of_each(needs, operands, origin, first, count);
      }
    }
  }
}

}  // namespace
}  // namespace annulus::ring
