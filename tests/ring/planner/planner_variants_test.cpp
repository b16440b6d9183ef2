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

/// The messages that ranks receive from other nodes, each with its receiver.
std::vector<std::pair<int, Transfer>> messages_across(const Plan& plan,
                                                      const std::vector<int>& node_of_rank) {
  std::vector<std::pair<int, Transfer>> messages;
  const auto node = [&](int rank) { return node_of_rank[static_cast<std::size_t>(rank)]; };
  for (const RankPlan& rank : plan.ranks) {
    for (const Exchange* exchange : rank.all<Exchange>()) {
      for (const Transfer& transfer : exchange->receives) {
        if (node(transfer.peer) != node(rank.rank)) messages.emplace_back(rank.rank, transfer);
      }
    }
  }
  return messages;
}

/// The number of tokens that cross to another node, by the rank that owns them and that node.
std::map<std::pair<int, int>, std::int64_t> crossings(const Plan& plan,
                                                      const std::vector<int>& node_of_rank) {
  std::map<std::pair<int, int>, std::int64_t> count;
  for (const auto& [rank, message] : messages_across(plan, node_of_rank)) {
    count[{message.origin, node_of_rank[static_cast<std::size_t>(rank)]}] += message.tokens.count;
  }
  return count;
}

std::int64_t bytes_across(const Plan& plan, const std::vector<int>& node_of_rank) {
  std::int64_t bytes = 0;
  for (const auto& message : messages_across(plan, node_of_rank)) bytes += message.second.bytes;
  return bytes;
}

// The last of two sequence axes exchanges heads; of one, as many ranks as share the heads evenly.
TEST(Planner, DegreesFollowAxesAndHeads) {
  const AttentionProblem problem = causal_problem(64, 8, 6);
  const auto degree = [&](const MeshShape& mesh, const char* spec) {
    const ShardedOperands operands = sharded_by(problem, mesh, spec, spec);
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
  const AttentionProblem problem = unmasked_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 6, LayoutKind::contiguous);
  for (const bool direct : {false, true}) {
    const PlanOptions options{.direct = direct, .inner_size = 3};
    const Plan plan = make_plan(native_input(problem, operands, options), Schedule::double_ring);
    const auto ways = crossings(plan, {0, 0, 0, 1, 1, 1});  // rows are nodes
    EXPECT_EQ(ways.size(), 6U);
    for (const auto& [shard, tokens] : ways) {
      EXPECT_EQ(tokens, operands.key.local_shape(shard.first)[1]);
    }
  }
}

// Columns that enter a row come beside the hops of the round before, in parts worth a message.
TEST(Planner, ColumnsEnterARowBesideTheHopsInIt) {
  AttentionProblem problem = unmasked_problem(8 * 128, 4, 4, 4096);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const PlanOptions options{.inner_size = 4};
  const Plan plan = make_plan(native_input(problem, operands, options), Schedule::double_ring);
  expect_valid(plan, operands);
  for (const RankPlan& rank : plan.ranks) {
    std::vector<int> entering;
    for (const Exchange* exchange : rank.all<Exchange>()) {
      entering.push_back(0);
      for (const Transfer& transfer : exchange->receives) {
        if (transfer.peer / 4 != rank.rank / 4) entering.back() += 1;
      }
      EXPECT_GT(exchange->receives.size(), static_cast<std::size_t>(entering.back()))
          << "an exchange of nothing but columns from another row";
    }
    EXPECT_THAT(entering, testing::ElementsAre(1, 1, 1, 0, 0, 0));
  }
}

// In every turn, the ranks of a node get their messages from another node from different ranks of
// that node.
TEST(Planner, RanksOfANodeAskDifferentRanksOfAnother) {
  AttentionProblem problem = causal_problem(4096, 12, 12);
  PlanInput input = native_input(problem, sequence_operands(problem, 12, LayoutKind::contiguous));
  for (int rank = 0; rank < 12; ++rank) input.prices.node_of_rank.push_back(rank / 4);
  const Plan plan = make_plan(input, Schedule::ulysses);
  for (const auto side : {&Exchange::receives, &Exchange::sends}) {
    for (int node = 0; node < 3; ++node) {
      std::vector<std::set<int>> peers;  // by turn
      std::size_t messages = 0;
      for (int rank = 4 * node; rank < 4 * node + 4; ++rank) {
        std::vector<int> across;
        const auto& transfers =
            plan.ranks[static_cast<std::size_t>(rank)].all<Exchange>()[0]->*side;
        for (const Transfer& transfer : transfers) {
          const bool again = !across.empty() && across.back() == transfer.peer;
          if (transfer.peer / 4 != node && !again) across.push_back(transfer.peer);
        }
        ASSERT_EQ(across.size(), 8U);
        peers.resize(across.size());
        for (std::size_t turn = 0; turn < across.size(); ++turn) peers[turn].insert(across[turn]);
        messages += transfers.size();
      }
      EXPECT_GE(messages, 44U);
      for (const std::set<int>& turn : peers) EXPECT_EQ(turn.size(), 4U);
    }
  }
}

// 128k causal on 32 GPUs of four nodes, as many heads: the example of docs/planning.md.
struct FourNodes {
  explicit FourNodes(std::int64_t heads = 32, std::int64_t kv_heads = 32)
      : problem(causal_problem(1 << 17, heads, kv_heads, 128)) {}
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

/// The predicted time of a variant, and the bytes of its buffers.
struct Played {
  ScheduleVariant variant;
  double seconds = 0;
  std::int64_t bytes = 0;
};

std::vector<Played> play_all(const PlanInput& input) {
  std::vector<Played> all;
  each_variant(input, [&](const PlanInput& with, const ScheduleVariant& variant) {
    const Plan plan = make_plan(with, variant.schedule);
    Played played{variant, predicted_seconds(plan, with.prices), 0};
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_LE(least_seconds(rank, with.prices), played.seconds) << variant_text(variant);
      played.bytes = std::max(played.bytes, rank.buffer_bytes(BufferKind::exchange) +
                                                rank.buffer_bytes(BufferKind::local));
    }
    all.push_back(played);
  });
  return all;
}

const Played& fastest_of(const std::vector<Played>& all) {
  return *std::min_element(all.begin(), all.end(),
                           [](const Played& a, const Played& b) { return a.seconds < b.seconds; });
}

// Heads are exchanged inside nodes, and shards go round between them. With the default degree, 32,
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

// Only auto compares degrees. Here 32 ranks lie along one axis.
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

// The degree counts the heads that a rank has.
TEST(Planner, ANamedHybridLeavesNoRankIdleWhereHeadsAreSharded) {
  const AttentionProblem problem = causal_problem(64, 8, 8);
  const ShardedOperands operands = sharded_by(problem, MeshShape({{"tp", 4}, {"sp", 8}}), "-,sp,tp",
                                              "-,sp,tp", LayoutKind::zigzag);
  const PlanInput input = native_input(problem, operands);
  EXPECT_EQ(variant_text(choose_schedule(input, "hybrid")), "hybrid (ulysses degree 2)");
  const Plan plan = make_plan(input, Schedule::hybrid);
  expect_valid(plan, operands);
  for (const RankPlan& rank : plan.ranks) EXPECT_GT(rank.work(), 0);
}

// A hybrid of degree 1 has the plan of ring, and a hybrid of all ranks that of ulysses.
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
  const ShardedOperands operands =
      sharded_by(problem, MeshShape({{"a", 2}, {"b", 4}}), "-,a+b", "-,a+b");
  EXPECT_EQ(choose_schedule(native_input(problem, operands), "hybrid").ulysses_degree, 4);
}

TEST(Planner, PlansSayTheirDegree) {
  FourNodes four;
  const PlanInput input = with_variant(four.input(), {Schedule::hybrid, 16, 0});
  const Plan hybrid = make_plan(input, Schedule::hybrid, {0});
  EXPECT_EQ(hybrid.ulysses_degree, 16);
  EXPECT_THAT(to_text(hybrid), testing::HasSubstr("schedule hybrid (ulysses degree 16)\n"));
  EXPECT_THAT(to_json(hybrid), testing::HasSubstr("\"ulysses_degree\": 16"));
  const Plan rings = make_plan(input, Schedule::double_ring, {0});
  EXPECT_EQ(rings.inner_size, 8);
  EXPECT_EQ(rings.ulysses_degree, 0);
  EXPECT_THAT(to_text(rings), testing::HasSubstr("schedule double_ring (inner size 8)\n"));
}

// Ring and ulysses are predicted to take the same; the ring comes first in the table.
TEST(Planner, TiesGoToTheOneThatNeedsLessMemory) {
  AttentionProblem problem = causal_problem(1 << 17, 32, 32, 128);
  const PlanInput input = flash_input(problem, sequence_operands(problem, 8, LayoutKind::zigzag));
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

// A shard crosses to a node once, and goes on inside it.
TEST(Planner, RingsSendEachShardToANodeOnce) {
  AttentionProblem problem = unmasked_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const std::vector halves{0, 0, 0, 0, 1, 1, 1, 1}, pairs{0, 0, 1, 1, 2, 2, 3, 3},
      uneven{0, 0, 0, 0, 0, 1, 1, 2};
  for (const auto& [nodes, inner] :
       {std::pair{halves, 8}, {pairs, 8}, {uneven, 8}, {halves, 4}, {halves, 2}, {pairs, 2}}) {
    PlanInput input = native_input(problem, operands, {.direct = true, .inner_size = inner});
    input.prices.node_of_rank = nodes;
    const Plan plan = make_plan(input, inner == 8 ? Schedule::ring : Schedule::double_ring);
    expect_valid(plan, operands);
    for (const auto& [way, tokens] : crossings(plan, nodes)) {
      EXPECT_EQ(tokens, operands.key.local_shape(way.first)[1])
          << "shard " << way.first << " to node " << way.second << " of " << nodes.back() + 1
          << ", inner size " << inner;
    }
  }
}

// The nodes of eight ranks: of equal sizes, of different sizes, and with ranks that are apart.
const std::vector<std::vector<int>> kPlacements{{0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3},
                                                {0, 0, 0, 0, 0, 1, 1, 2}, {0, 1, 0, 1, 0, 1, 0, 1},
                                                {0, 1, 1, 2, 0, 2, 2, 2}, {0, 0, 0, 0, 0, 0, 0, 1}};

// Once in every group of heads.
TEST(Planner, GatheredShardsEnterANodeOnce) {
  AttentionProblem problem = unmasked_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  for (const std::int64_t gather_bytes : {1, 1 << 20}) {
    PlanInput input = native_input(problem, operands, {.gather_bytes = gather_bytes});
    for (const std::vector<int>& nodes : kPlacements) {
      input.prices.node_of_rank = nodes;
      const Plan plan = make_plan(input, Schedule::allgather);
      expect_valid(plan, operands);
      const std::map<std::pair<int, int>, std::int64_t> ways = crossings(plan, nodes);
      const std::set<int> different(nodes.begin(), nodes.end());
      EXPECT_EQ(ways.size(), 8 * (different.size() - 1));
      // By two groups of heads, or all heads at once.
      const std::int64_t times = gather_bytes == 1 ? 2 : 1;
      for (const auto& [way, tokens] : ways) {
        EXPECT_EQ(tokens, times * operands.key.local_shape(way.first)[1]);
      }
    }
  }
}

// The ranks of a node share what enters it, even where the last of them needs most.
TEST(Planner, EveryRankTakesItsShareOfWhatEntersItsNode) {
  const AttentionProblem problem = causal_problem(64);
  for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::contiguous}) {
    PlanInput input = native_input(problem, sequence_operands(problem, 8, layout));
    input.prices.node_of_rank = kPlacements[0];
    std::set<std::pair<int, int>> taken;  // rank, and origin of what it gets from the other node
    const Plan plan = make_plan(input, Schedule::allgather);
    for (const auto& [rank, message] : messages_across(plan, kPlacements[0])) {
      taken.emplace(rank, message.origin);
    }
    std::set<std::pair<int, int>> expected;  // contiguous: the first node sees no later columns
    for (int rank = layout == LayoutKind::contiguous ? 4 : 0; rank < 8; ++rank) {
      expected.emplace(rank, (rank + 4) % 8);
    }
    EXPECT_EQ(taken, expected);
  }
}

// Under any mask a rank receives as many bytes as straight from the owners, so none passes on what
// it does not need itself. And no more bytes cross between nodes.
TEST(Planner, GatheringOverNodesSendsNoMore) {
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced}) {
    for (int mask = 0; mask < 7; ++mask) {
      AttentionProblem problem = causal_problem(83, 4, 2);
      Mask& m = problem.mask;
      m.set_causal(mask < 4);
      if (mask == 1) m.set_window(19, -1);
      if (mask == 2) m.set_offset(-9);
      if (mask == 3) {
        const auto ids =
            segments_from_cu_seqlens(std::vector<std::int32_t>{0, 3, 30, 31, 70, 83}, 83);
        m.set_segments(1, ids, ids);
      }
      if (mask == 4) m.set_window(14, 13);
      if (mask == 5) m.set_block_mask(BlockMask::random(83, 83, 4, 0.3, 1, {5, 7}));
      if (mask == 6) m.set_block_mask(BlockMask::strided(83, 83, 1, 3, {4, 4}));
      const ShardedOperands operands = sequence_operands(problem, 8, layout);
      for (std::size_t placement = 0; placement < kPlacements.size(); ++placement) {
        SCOPED_TRACE(testing::Message() << name_of(layout) << ", mask " << to_string(m)
                                        << ", placement " << placement);
        const std::vector<int>& nodes = kPlacements[placement];
        for (const std::int64_t gather_bytes : {1, 1 << 20}) {
          PlanInput input = native_input(problem, operands, {.gather_bytes = gather_bytes});
          const Plan direct = make_plan(input, Schedule::allgather);
          input.prices.node_of_rank = nodes;
          const Plan plan = make_plan(input, Schedule::allgather);
          expect_valid(plan, operands, static_cast<unsigned>(mask));
          for (std::size_t rank = 0; rank < plan.ranks.size(); ++rank) {
            EXPECT_EQ(plan.ranks[rank].bytes_received(), direct.ranks[rank].bytes_received());
          }
          EXPECT_LE(bytes_across(plan, nodes), bytes_across(direct, nodes));
          if (mask == 0 && placement < 2) {
            EXPECT_LT(bytes_across(plan, nodes), bytes_across(direct, nodes));
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Ranks of a node need different numbers of a shard's columns. Only the most cross, as the others
// are part of them.
TEST(Planner, TheRankOfANodeThatNeedsMostGetsItFirst) {
  AttentionProblem problem = causal_problem(64);
  problem.mask.set_window(19, 0);
  PlanInput input = native_input(problem, sequence_operands(problem, 8, LayoutKind::contiguous));
  input.prices.node_of_rank = kPlacements[0];
  std::map<std::pair<int, int>, std::int64_t> columns;  // of an origin, that a rank gets from there
  const Plan plan = make_plan(input, Schedule::allgather);
  for (const auto& [rank, message] : messages_across(plan, kPlacements[0])) {
    columns[{message.origin, rank}] += message.tokens.count;
  }
  // Rank 4 has rows 32 to 39, which see columns from 13 on; rank 5 sees columns from 21 on.
  const std::map<std::pair<int, int>, std::int64_t> expected{{{1, 4}, 3}, {{2, 4}, 8}, {{3, 4}, 8}};
  EXPECT_EQ(columns, expected);
}

// One group of heads is computed while the next is passed on inside nodes, and the one after that
// crosses between nodes.
TEST(Planner, GatheringOverNodesHasThreeGroupsOfHeadsInFlight) {
  AttentionProblem problem = unmasked_problem(64, 8, 8);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  PlanInput input = native_input(problem, operands, {.gather_bytes = 1});
  for (const auto& [nodes, buffers] :
       {std::pair{std::vector{0, 0, 0, 0}, 2U}, {{0, 0, 1, 1}, 3U}, {{0, 1, 2, 3}, 2U}}) {
    input.prices.node_of_rank = nodes;
    const RankPlan plan = make_rank_plan(input, Schedule::allgather, 1);
    std::set<int> memories;
    for (const Exchange* exchange : plan.all<Exchange>()) {
      for (const Transfer& transfer : exchange->receives) {
        memories.insert(plan.memory_of(transfer.buffer));
      }
    }
    EXPECT_EQ(memories.size(), buffers);
    // One for each group of heads, and one more to pass on the last.
    EXPECT_EQ(plan.all<Exchange>().size(), buffers == 3 ? 9U : 8U);
  }
}

// Ranks that are linked alike get columns from their owners: one sender for each origin.
TEST(Planner, OwnersSendWhereLinksAreAlike) {
  AttentionProblem problem = unmasked_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  for (const auto& [nodes, owners] :
       {std::pair{std::vector{0, 0, 0, 0}, true}, {{0, 1, 2, 3}, true}, {{0, 0, 1, 1}, false}}) {
    PlanInput input = native_input(problem, operands, {.direct = true});
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
  AttentionProblem problem = unmasked_problem(64, 8, 8);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const std::vector<int> nodes{0, 0, 0, 0, 1, 1, 1, 1};
  std::map<bool, std::int64_t> across;
  for (const bool direct : {false, true}) {
    PlanInput input = native_input(problem, operands, {.direct = direct, .ulysses_degree = 2});
    input.prices.node_of_rank = nodes;
    const Plan plan = make_plan(input, Schedule::hybrid);
    expect_valid(plan, operands);
    across[direct] = bytes_across(plan, nodes);
  }
  EXPECT_EQ(across[true], across[false]);
  // All keys and values go to the other node once; what began in the middle of a node comes back
  // to its first rank. Sent directly, they would go to the other node twice.
  const std::int64_t all = problem.shape.kv_length * 8 * (64 + 64) * 2;
  EXPECT_EQ(across[true], all + all / 2);
}

}  // namespace
}  // namespace annulus::ring
