// Degrees of ulysses, rows of rings, and how both follow the nodes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

#include "schedules/schedules.hpp"
#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

// The last of two sequence axes exchanges heads; of one, as many ranks as share the heads evenly.
TEST(Planner, DegreesFollowAxesAndHeads) {
  const AttentionProblem problem = causal_problem(64, 8, 6);
  const auto degree = [&](const MeshShape& mesh, const char* spec) {
    const ShardedOperands operands = shard_operands(
        problem, mesh,
        {PartitionSpec::parse(spec), PartitionSpec::parse(spec), LayoutKind::contiguous});
    return ulysses_degree(native_input(problem, operands));
  };
  EXPECT_EQ(degree(MeshShape({{"a", 4}, {"b", 2}}), "-,a+b"), 2);
  EXPECT_EQ(degree(MeshShape({{"a", 2}, {"b", 4}}), "-,a+b"), 4);
  EXPECT_EQ(degree(MeshShape({{"a", 8}, {"b", 1}}), "-,a+b"), 2);
  EXPECT_EQ(degree(MeshShape({{"a", 9}}), "-,a"), 3);
}

TEST(Planner, RowsAreTheRanksOfANode) {
  const AttentionProblem problem = causal_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 6, LayoutKind::contiguous);
  EXPECT_EQ(ranks_per_row(operands.key, {0, 0, 0, 1, 1, 1}), 3);
  EXPECT_EQ(ranks_per_row(operands.key, {0, 0, 1, 1, 0, 0}), 2);
  EXPECT_EQ(ranks_per_row(operands.key, {0, 0, 0, 0, 0, 0}), 6);
  EXPECT_EQ(ranks_per_row(operands.key, {0, 0, 0, 0, 1, 1}), 6);
  EXPECT_EQ(ranks_per_row(operands.key, {0, 1, 0, 1, 0, 1}), 1);
}

// Columns cross to another row once, and go on inside it.
TEST(Planner, DoubleRingsSendEachShardToARowOnce) {
  const AttentionProblem problem = [] {
    AttentionProblem full = causal_problem(64);
    full.mask.set_causal(false);
    return full;
  }();
  const ShardedOperands operands = sequence_operands(problem, 6, LayoutKind::contiguous);
  for (const bool direct : {false, true}) {
    PlanOptions options;
    options.direct = direct;
    options.inner_size = 3;
    const Plan plan = make_plan(native_input(problem, operands, options), Schedule::double_ring);
    std::map<std::pair<int, int>, int> crossings;  // origin and row
    for (const RankPlan& rank : plan.ranks) {
      for (const Exchange* exchange : rank.all<Exchange>()) {
        for (const Transfer& transfer : exchange->receives) {
          if (transfer.peer / 3 != rank.rank / 3) ++crossings[{transfer.origin, rank.rank / 3}];
        }
      }
    }
    EXPECT_EQ(crossings.size(), 6U);
    for (const auto& [shard, times] : crossings) EXPECT_EQ(times, 1);
  }
}

// 128k causal on 32 GPUs of four nodes, as many heads: the example of docs/planning.md.
struct FourNodes {
  explicit FourNodes(std::int64_t heads = 32, std::int64_t kv_heads = 32)
      : problem(causal_problem(1 << 17, heads, kv_heads)) {
    problem.shape.head_dim = problem.shape.value_dim = 128;
  }
  [[nodiscard]] PlanInput input(
      const PlanOptions& options = PlanOptions::for_place(Place::cuda(0))) {
    PlanInput made = flash_input(problem, operands, options);
    made.prices.model.adopt_transport("composite");
    for (int rank = 0; rank < 32; ++rank) made.prices.node_of_rank.push_back(rank / 8);
    return made;
  }
  AttentionProblem problem;
  ShardedOperands operands = sequence_operands(problem, 32, LayoutKind::zigzag);
};

/// What a variant is predicted to take, and how many bytes of buffers.
struct Played {
  ScheduleVariant variant;
  double seconds = 0;
  std::int64_t bytes = 0;
};

std::vector<Played> play_all(const PlanInput& input, const char* name = "auto") {
  std::vector<Played> all;
  for (const ConsideredVariant& one : variants_for(input, name)) {
    if (!one.obstacle.empty() || !one.pointless.empty()) continue;
    PlanInput with = input;
    with.options = with_variant(input.options, one.variant);
    const Plan plan = make_plan(with, one.variant.schedule, sample_ranks(input, kJudges));
    Played played{one.variant, predicted_seconds(plan, with.prices), 0};
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_LE(least_seconds(rank, with.prices), played.seconds) << variant_text(one.variant);
      played.bytes = std::max(played.bytes, rank.buffer_bytes(BufferKind::exchange) +
                                                rank.buffer_bytes(BufferKind::local));
    }
    all.push_back(played);
  }
  return all;
}

const Played& fastest_of(const std::vector<Played>& all) {
  return *std::min_element(all.begin(), all.end(),
                           [](const Played& a, const Played& b) { return a.seconds < b.seconds; });
}

// Heads are exchanged inside nodes, and shards go round between them. With the usual degree, 32,
// which is ulysses, it is slower by more than a tenth.
TEST(Planner, AutoFindsTheBestDegree) {
  FourNodes four;
  const PlanInput input = four.input();
  const ScheduleChoice choice = choose_schedule(input, "auto");
  EXPECT_EQ(variant_text(choice), "hybrid (ulysses degree 8)");
  EXPECT_NEAR(choice.seconds, fastest_of(play_all(input)).seconds, 1e-9);
  std::set<std::string> considered{variant_text(choice)};
  for (const auto& other : choice.passed_over) {
    considered.insert(variant_text(other));
    const double seconds = other.seconds > 0 ? other.seconds : 1;
    if (other.schedule != Schedule::hybrid) {
      EXPECT_GT(seconds, 1.1 * choice.seconds);
    }
  }
  for (const char* variant : {"hybrid (ulysses degree 2)", "hybrid (ulysses degree 4)",
                              "hybrid (ulysses degree 16)", "double_ring (inner size 8)", "ring"}) {
    EXPECT_THAT(considered, testing::Contains(variant));
  }
}

// Only auto compares degrees: 32 ranks along one axis, and so many key/value heads.
TEST(Planner, ANamedHybridTakesTheLargestCommonDivisor) {
  for (const auto& [kv_heads, degree] : {std::pair{32, 32}, {8, 8}, {24, 8}, {6, 2}, {3, 1}}) {
    FourNodes four(kv_heads, kv_heads);
    const PlanInput input = four.input();
    const ScheduleChoice choice = choose_schedule(input, "hybrid");
    EXPECT_EQ(variant_text(choice), fmt::format("hybrid (ulysses degree {})", degree));
    EXPECT_TRUE(choice.passed_over.empty());
    EXPECT_EQ(make_plan(input, Schedule::hybrid, {0}).ulysses_degree, degree);
  }
}

// The ends of hybrid do what the schedules do that they are.
TEST(Planner, HybridsOfOneAndOfAllRanksAreRingAndUlysses) {
  for (const auto& [kv_heads, same] : {std::pair{3, Schedule::ring}, {4, Schedule::ulysses}}) {
    const AttentionProblem problem = causal_problem(64, 12, kv_heads);
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
    const PlanInput input = native_input(problem, operands);
    const Plan hybrid = make_plan(input, Schedule::hybrid);
    expect_valid(hybrid, operands);
    Plan other = make_plan(input, same);
    EXPECT_NE(to_json(hybrid), to_json(other));
    other.schedule = Schedule::hybrid;
    other.ulysses_degree = hybrid.ulysses_degree;
    EXPECT_EQ(to_json(hybrid), to_json(other));
  }
}

TEST(Planner, DegreesLeaveNoRankWithoutHeads) {
  FourNodes four(4, 4);
  std::set<int> degrees;
  for (const ConsideredVariant& one : variants_for(four.input(), "auto")) {
    if (one.variant.schedule == Schedule::hybrid) degrees.insert(one.variant.ulysses_degree);
  }
  EXPECT_THAT(degrees, testing::ElementsAre(2, 4));
}

TEST(Planner, ANamedDegreeStays) {
  FourNodes four;
  PlanOptions options = PlanOptions::for_place(Place::cuda(0));
  options.ulysses_degree = 4;
  options.inner_size = 16;
  for (const char* name : {"auto", "hybrid", "double_ring"}) {
    for (const ConsideredVariant& one : variants_for(four.input(options), name)) {
      if (one.variant.schedule == Schedule::hybrid) {
        EXPECT_EQ(one.variant.ulysses_degree, 4);
      }
      if (one.variant.schedule == Schedule::double_ring) {
        EXPECT_EQ(one.variant.inner_size, 16);
      }
    }
  }
  EXPECT_EQ(choose_schedule(four.input(options), "hybrid").ulysses_degree, 4);
  EXPECT_EQ(choose_schedule(four.input(options), "double_ring").inner_size, 16);
  // Two axes name a degree where hybrid is named.
  const AttentionProblem problem = causal_problem(4096, 8, 8);
  const ShardedOperands operands = shard_operands(
      problem, MeshShape({{"a", 2}, {"b", 4}}),
      {PartitionSpec::parse("-,a+b"), PartitionSpec::parse("-,a+b"), LayoutKind::contiguous});
  EXPECT_EQ(choose_schedule(native_input(problem, operands), "hybrid").ulysses_degree, 4);
}

TEST(Planner, PlansSayTheirDegree) {
  FourNodes four;
  PlanInput input = four.input();
  input.options = with_variant(input.options, {Schedule::hybrid, 16, 0});
  const Plan hybrid = make_plan(input, Schedule::hybrid, {0});
  EXPECT_EQ(hybrid.ulysses_degree, 16);
  EXPECT_THAT(to_text(hybrid), testing::HasSubstr("schedule hybrid (ulysses degree 16)\n"));
  EXPECT_THAT(to_json(hybrid), testing::HasSubstr("\"ulysses_degree\": 16"));
  const Plan rings = make_plan(input, Schedule::double_ring, {0});
  EXPECT_EQ(rings.inner_size, 8);
  EXPECT_EQ(rings.ulysses_degree, 0);
  EXPECT_THAT(to_text(rings), testing::HasSubstr("schedule double_ring (inner size 8)\n"));
}

// Passing over what cannot win changes nothing: the choice is as fast as the fastest, within noise,
// and needs no more memory.
TEST(Planner, TheBestOfAllVariantsIsChosen) {
  for (const std::int64_t length : {1 << 11, 1 << 14, 1 << 17}) {
    for (const auto& [heads, kv_heads] : {std::pair{32, 32}, {64, 8}, {8, 1}}) {
      for (const auto& [ranks, nodes] : {std::pair{8, 1}, {8, 2}, {12, 2}}) {
        const AttentionProblem problem = causal_problem(length, heads, kv_heads);
        const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::zigzag);
        PlanInput input = flash_input(problem, operands);
        for (int r = 0; nodes > 1 && r < ranks; ++r) {
          input.prices.node_of_rank.push_back(r * nodes / ranks);
        }
        if (nodes > 1) input.prices.model.adopt_transport("composite");
        const ScheduleChoice choice = choose_schedule(input, "auto");
        const std::vector<Played> all = play_all(input);
        const auto chosen = std::find_if(all.begin(), all.end(),
                                         [&](const Played& one) { return one.variant == choice; });
        ASSERT_NE(chosen, all.end());
        const Played& fastest = fastest_of(all);
        const std::string what = fmt::format("{} of {}/{} heads, {} ranks on {} nodes: {}, or {}",
                                             length, heads, kv_heads, ranks, nodes,
                                             variant_text(choice), variant_text(fastest.variant));
        EXPECT_EQ(chosen->seconds, choice.seconds) << what;
        EXPECT_LE(choice.seconds, fastest.seconds * 1.01 * 1.01) << what;
        EXPECT_LE(chosen->bytes, fastest.bytes) << what;
      }
    }
  }
}

// Ring and ulysses are predicted to take the same; the ring comes first in the table.
TEST(Planner, TiesGoToTheOneThatNeedsLessMemory) {
  AttentionProblem problem = causal_problem(1 << 17, 32, 32);
  problem.shape.head_dim = problem.shape.value_dim = 128;
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::zigzag);
  const PlanInput input = flash_input(problem, operands);
  const ScheduleChoice choice = choose_schedule(input, "auto");
  const std::vector<Played> all = play_all(input);
  const double fastest = fastest_of(all).seconds;
  const Played* first = nullptr;
  const Played* least = nullptr;
  for (const Played& one : all) {
    if (one.seconds > fastest * 1.01) continue;
    if (first == nullptr) first = &one;
    if (least == nullptr || one.bytes < least->bytes) least = &one;
  }
  ASSERT_NE(variant_text(first->variant), variant_text(least->variant));
  EXPECT_EQ(variant_text(choice), variant_text(least->variant));
  for (const auto& other : choice.passed_over) {
    if (!(static_cast<const ScheduleVariant&>(other) == first->variant)) continue;
    EXPECT_THAT(other.reason,
                testing::HasSubstr("tie, in which " + variant_text(choice) + " needs less memory"));
  }
}

/// Messages that cross to another node, by the rank they are of and the node they come to.
std::map<std::pair<int, int>, int> crossings(const Plan& plan,
                                             const std::vector<int>& node_of_rank) {
  std::map<std::pair<int, int>, int> count;
  const auto node = [&](int rank) { return node_of_rank[static_cast<std::size_t>(rank)]; };
  for (const RankPlan& rank : plan.ranks) {
    for (const Exchange* exchange : rank.all<Exchange>()) {
      for (const Transfer& transfer : exchange->receives) {
        if (node(transfer.peer) != node(rank.rank)) ++count[{transfer.origin, node(rank.rank)}];
      }
    }
  }
  return count;
}

// A shard crosses to a node once, and goes on inside it.
TEST(Planner, RingsSendEachShardToANodeOnce) {
  AttentionProblem problem = causal_problem(64);
  problem.mask.set_causal(false);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const std::vector halves{0, 0, 0, 0, 1, 1, 1, 1}, pairs{0, 0, 1, 1, 2, 2, 3, 3},
      uneven{0, 0, 0, 0, 0, 1, 1, 2};
  for (const auto& [nodes, inner] :
       {std::pair{halves, 8}, {pairs, 8}, {uneven, 8}, {halves, 4}, {halves, 2}, {pairs, 2}}) {
    PlanOptions options;
    options.direct = true;
    options.inner_size = inner;
    PlanInput input = native_input(problem, operands, options);
    input.prices.node_of_rank = nodes;
    const Plan plan = make_plan(input, inner == 8 ? Schedule::ring : Schedule::double_ring);
    expect_valid(plan, operands);
    for (const auto& [way, times] : crossings(plan, nodes)) {
      EXPECT_EQ(times, 1) << "shard " << way.first << " to node " << way.second << " of "
                          << nodes.back() + 1 << ", inner size " << inner;
    }
  }
}

// Ranks that are linked alike get columns from their owners: one sender for each origin.
TEST(Planner, OwnersSendWhereLinksAreAlike) {
  AttentionProblem problem = causal_problem(64);
  problem.mask.set_causal(false);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  for (const auto& [nodes, owners] :
       {std::pair{std::vector{0, 0, 0, 0}, true}, {{0, 1, 2, 3}, true}, {{0, 0, 1, 1}, false}}) {
    PlanOptions options;
    options.direct = true;
    PlanInput input = native_input(problem, operands, options);
    input.prices.node_of_rank = nodes;
    bool all = true;
    for (const RankPlan& rank : make_plan(input, Schedule::ring).ranks) {
      for (const Exchange* exchange : rank.all<Exchange>()) {
        for (const Transfer& transfer : exchange->receives) all &= transfer.peer == transfer.origin;
      }
    }
    EXPECT_EQ(all, owners) << nodes[1] << nodes[2];
  }
}

// The ring of hybrid is one of the ranks that hold the same heads.
TEST(Planner, RingsOfHybridSendEachShardToANodeOnce) {
  AttentionProblem problem = causal_problem(64, 8, 8);
  problem.mask.set_causal(false);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const std::vector<int> nodes{0, 0, 0, 0, 1, 1, 1, 1};
  std::map<bool, std::int64_t> across;
  for (const bool direct : {false, true}) {
    PlanOptions options;
    options.direct = direct;
    options.ulysses_degree = 2;
    PlanInput input = native_input(problem, operands, options);
    input.prices.node_of_rank = nodes;
    const Plan plan = make_plan(input, Schedule::hybrid);
    expect_valid(plan, operands);
    for (const RankPlan& rank : plan.ranks) {
      for (const Exchange* exchange : rank.all<Exchange>()) {
        for (const Transfer& transfer : exchange->receives) {
          if (transfer.peer / 4 != rank.rank / 4) across[direct] += transfer.bytes;
        }
      }
    }
  }
  EXPECT_EQ(across[true], across[false]);
  // All keys and values go to the other node once; what began in the middle of a node comes back
  // to its first rank. Sent directly, they would go to the other node twice.
  const std::int64_t all = problem.shape.kv_length * 8 * (64 + 64) * 2;
  EXPECT_EQ(across[true], all + all / 2);
}

}  // namespace
}  // namespace annulus::ring
