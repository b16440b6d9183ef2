// Tests of the refusals that ranks tell each other, for thousands of ranks in one process.

#include "schedules/building/refusals.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/mesh/fabric.hpp"

namespace annulus::ring {
namespace {

constexpr int kRanks = 256;
constexpr std::int64_t kRows = 64;  // of a rank

PositionRanges positions_of(int rank, bool striped) {
  const PositionRange range = striped ? PositionRange{GlobalPosition(rank), kRows, kRanks}
                                      : PositionRange{GlobalPosition(rank * kRows), kRows, 1};
  return PositionRanges({range});
}

// Every block of a causal ring on one rank.
std::vector<Refusal> all_blocks(int rank, bool striped) {
  std::vector<Refusal> refusals;
  for (int origin = 0; origin < kRanks; ++origin) {
    if (!striped && origin > rank) break;
    refusals.push_back({"picky",
                        positions_of(rank, striped),
                        positions_of(origin, striped),
                        {0, 1},
                        4,
                        !striped && origin < rank,
                        "rank " + std::to_string(rank)});
  }
  return refusals;
}

class Refusals : public ::testing::TestWithParam<bool> {};

TEST_P(Refusals, AreMergedByClassAlongTheTree) {
  const bool striped = GetParam();
  AttentionProblem problem;
  problem.shape = {1, kRanks * kRows, kRanks * kRows, 4, 4, 16, 16};
  problem.mask.set_causal(true);
  test::Fabric fabric(kRanks);
  fabric.run([&](int rank) {
    const auto refused = refusals_of_all(fabric.control(rank), problem, all_blocks(rank, striped));
    // A full block and one on the diagonal; if striped, a block per distance.
    ASSERT_EQ(refused.size(), striped ? 2U * kRanks - 1 : 2U);
    EXPECT_EQ(refused.front().reason, "rank 0");
  });
  EXPECT_LE(fabric.most_messages(), 2U * 9);
  // A gather of all blocks would send each rank 256² of them if striped, half of that if not.
  const std::size_t each = fabric.all_bytes() / kRanks;
  std::printf("  %d ranks, %s: %zu B per rank\n", kRanks, striped ? "striped" : "contiguous", each);
  EXPECT_LE(each, striped ? 1U << 20 : 1U << 10);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Refusals, ::testing::Bool());

TEST(RefusalClasses, BlocksOfOneClassDifferOnlyInWhereTheyLie) {
  AttentionProblem problem;
  problem.shape = {2, 128, 128, 4, 4, 16, 16};
  problem.mask.set_causal(true);
  const auto refusal = [](std::int64_t row, std::int64_t column, std::int64_t batch, bool full) {
    return Refusal{"picky",
                   PositionRanges({{GlobalPosition(row), 16, 1}}),
                   PositionRanges({{GlobalPosition(column), 16, 1}}),
                   {batch, 1},
                   4,
                   full,
                   "reason"};
  };
  const auto alike = [&](const Refusal& a, const Refusal& b) {
    return class_of(problem, a).is_of_the_class_of(class_of(problem, b));
  };
  EXPECT_TRUE(alike(refusal(32, 32, 0, false), refusal(64, 64, 1, false)));
  EXPECT_FALSE(alike(refusal(32, 32, 0, false), refusal(64, 56, 0, false)));
  EXPECT_TRUE(alike(refusal(32, 16, 0, true), refusal(96, 0, 1, true)));
  EXPECT_FALSE(alike(refusal(32, 32, 0, false), refusal(32, 32, 0, true)));
  EXPECT_FALSE(alike(refusal(32, 32, 0, true), refusal(32, 16, 0, true)));  // own columns
  // Lengths hide columns by where they lie, and in each batch others; not in full blocks.
  problem.mask.set_kv_lengths({100, 50});
  EXPECT_FALSE(alike(refusal(32, 32, 0, false), refusal(64, 64, 0, false)));
  EXPECT_FALSE(alike(refusal(32, 32, 0, false), refusal(32, 32, 1, false)));
  EXPECT_TRUE(alike(refusal(32, 16, 0, true), refusal(96, 0, 1, true)));
}

}  // namespace
}  // namespace annulus::ring
