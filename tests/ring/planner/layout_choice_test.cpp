#include <ctime>
#include <random>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/layout_choice.hpp>
#include <annulus/ring/planner.hpp>

#include "recommend/planned_problem.hpp"

namespace annulus::ring {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::int64_t kMillion = 1 << 20;

AttentionOptions causal_options(std::int64_t length) {
  AttentionOptions problem;
  problem.shape = {1, length, length, 64, 8, 128, 128};
  problem.dtype = DType::bfloat16;
  problem.mask.set_causal(true);
  return problem;
}

// Edges at random positions, so that lengths differ widely.
AttentionOptions packed_problem(std::int64_t length, int documents, unsigned seed) {
  std::mt19937 random(seed);
  std::set<std::int32_t> edges{0, static_cast<std::int32_t>(length)};
  while (static_cast<int>(edges.size()) <= documents) {
    edges.insert(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(length)));
  }
  const auto ids = segments_from_cu_seqlens(std::vector(edges.begin(), edges.end()), length);
  AttentionOptions problem = causal_options(length);
  problem.mask.set_segments(1, ids, ids);
  return problem;
}

std::vector<int> nodes_of(int ranks, int per_node) {
  std::vector<int> nodes;
  for (int rank = 0; ranks > per_node && rank < ranks; ++rank) nodes.push_back(rank / per_node);
  return nodes;
}

LayoutChoice chosen(const AttentionOptions& problem, int ranks) {
  const Registry registry = Registry::standard();
  return choose_layout(problem, MeshShape({{"sp", ranks}}), nodes_of(ranks, 8), Place::cuda(0),
                       registry, Presence::assumed);
}

double seconds_of(const AttentionOptions& problem, int ranks, LayoutKind layout) {
  LayoutOptions asked = problem;
  asked.layout = layout;
  const Registry registry = Registry::standard();
  const PlannedProblem planned(problem, registry, Place::cuda(0), Presence::assumed,
                               nodes_of(ranks, 8));
  const LaidOut laid_out = planned.lay_out(MeshShape({{"sp", ranks}}), asked);
  return choose_schedule(planned.input(laid_out), planned.schedule()).seconds;
}

// Under a reproducible sum, some ranks refuse the blocks of a schedule that others take.
TEST(LayoutChoice, OneRefusedScheduleIsNotThatOfALayout) {
  AttentionOptions problem;
  problem.shape = {1, 960, 960, 2, 2, 64, 64};
  problem.mask.set_causal(true);
  problem.mask.set_window(100000, 0);
  problem.reproducible = Reproducible::world;
  const LayoutChoice choice = choose_layout(problem, MeshShape({{"sp", 3}}), {}, Place::host(),
                                            Registry::standard(), Presence::assumed);
  EXPECT_THAT(choice.why, ::testing::Not(HasSubstr("cannot run")));
}

TEST(LayoutChoice, WrongNamesAreErrors) {
  AttentionOptions problem = packed_problem(8192, 10, 1);
  problem.implementation = "natvie";
  EXPECT_THROW((void)chosen(problem, 8), ArgumentError);
  problem.implementation = "ring";
  problem.schedule = "ulysses";  // not that implementation's
  EXPECT_THROW((void)chosen(problem, 8), ArgumentError);
}

TEST(LayoutChoice, IsTheFastestOfPackedDocuments) {
  for (const auto& [length, documents, ranks] :
       {std::tuple(kMillion, 2000, 64), std::tuple(kMillion, 64, 64),
        std::tuple(kMillion / 8, 12, 8), std::tuple(kMillion / 4, 300, 32)}) {
    const AttentionOptions problem = packed_problem(length, documents, 3);
    const LayoutChoice choice = chosen(problem, ranks);
    const double taken = seconds_of(problem, ranks, choice.layout);
    for (const LayoutKind other :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::balanced}) {
      EXPECT_LE(taken, seconds_of(problem, ranks, other) * kTie)
          << documents << " documents on " << ranks << " ranks: " << choice.why;
    }
    EXPECT_THAT(choice.why, StartsWith("predicted "));
  }
  // Where pieces of documents would go to everyone, balance costs more than it gains.
  EXPECT_NE(chosen(packed_problem(kMillion, 2000, 3), 256).layout, LayoutKind::balanced);
}

TEST(LayoutChoice, IsQuickForManyDocuments) {
  const AttentionOptions problem = packed_problem(kMillion, 2000, 3);
  const std::clock_t begin = std::clock();
  static_cast<void>(chosen(problem, 256));
  // 0.3 s of CPU on a core of its own, and up to three times as long on one that others share.
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 1.5);
}

TEST(LayoutChoice, PrefersNeighboursUnderANarrowWindow) {
  AttentionOptions problem = causal_options(kMillion / 8);
  problem.mask.set_window(1023, 0);
  const LayoutChoice choice = chosen(problem, 64);
  EXPECT_EQ(choice.layout, LayoutKind::contiguous) << choice.why;
  EXPECT_THAT(choice.why, HasSubstr("zigzag"));
}

TEST(LayoutChoice, KeepsTheDefaultWhereNothingCanBeGained) {
  EXPECT_EQ(chosen(causal_options(kMillion), 32).why,
            "equal work for every rank under a causal mask");
  AttentionOptions problem = causal_options(kMillion);
  problem.mask = {};
  EXPECT_EQ(chosen(problem, 32).layout, LayoutKind::contiguous);
  EXPECT_EQ(chosen(packed_problem(kMillion / 8, 12, 3), 1).why, "the sequence is not sharded");
  EXPECT_THAT(chosen(packed_problem(4096, 12, 3), 32).why, HasSubstr("fewer than 256 queries"));
  // The priced layouts of plain masks agree.
  for (const int ranks : {4, 64}) {
    for (const std::int64_t length : {std::int64_t{32} << 10, kMillion}) {
      const AttentionOptions plain = causal_options(length);
      const double taken = seconds_of(plain, ranks, chosen(plain, ranks).layout);
      for (const LayoutKind other : {LayoutKind::contiguous, LayoutKind::balanced}) {
        EXPECT_LE(taken, seconds_of(plain, ranks, other) * 1.03);
      }
    }
  }
}

TEST(LayoutChoice, LeavesChoicesOfTheCaller) {
  AttentionOptions problem = packed_problem(kMillion / 8, 12, 3);
  problem.layout = LayoutKind::striped;
  EXPECT_EQ(chosen(problem, 8).layout, LayoutKind::striped);
  EXPECT_EQ(chosen(problem, 8).why, "as asked");
  problem.layout.reset();
  problem.kv_layout = LayoutKind::contiguous;
  const LayoutOptions& asked = problem;
  EXPECT_EQ(chosen(problem, 8).layout,
            default_layout(problem, MeshShape({{"sp", 8}}), asked).sequence);
}

TEST(LayoutChoice, ComparesBalancedRowsOnlyIfWorkIsUneven) {
  const MeshShape mesh({{"sp", 8}});
  AttentionOptions problem = causal_options(kMillion / 8);
  problem.mask.set_window(255, 0);
  EXPECT_THAT(open_layouts(problem, mesh, problem).layouts,
              ElementsAre(LayoutKind::zigzag, LayoutKind::contiguous));
  problem = packed_problem(kMillion / 8, 12, 3);
  EXPECT_THAT(open_layouts(problem, mesh, problem).layouts,
              testing::UnorderedElementsAre(LayoutKind::zigzag, LayoutKind::contiguous,
                                            LayoutKind::balanced));
}

}  // namespace
}  // namespace annulus::ring
