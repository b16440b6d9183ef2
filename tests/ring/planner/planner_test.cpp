#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
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
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

TEST(Planner, AutoTakesLocalWhenNothingIsShardedAndSaysWhy) {
  const AttentionProblem problem = causal_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 1, LayoutKind::contiguous);
  const ScheduleChoice choice = choose_schedule(native_input(problem, operands), "auto");
  EXPECT_EQ(choice.schedule, Schedule::local);
  ASSERT_EQ(choice.passed_over.size(), 6U);
  for (const auto& other : choice.passed_over) {
    EXPECT_NE(other.reason.find("not sharded"), std::string::npos);
  }
}

// Four GPUs with equal links: with few key/value heads a gather is hidden under a rank's own block,
// with many it is not, and heads are exchanged instead. As measured, see benchmarks/NOTES.md.
TEST(Planner, AutoForGpusFollowsTheMeasurements) {
  for (const auto& [heads, kv_heads, expected] :
       {std::tuple{64, 8, Schedule::allgather}, {32, 32, Schedule::ring}}) {
    AttentionProblem problem = causal_problem(8192, heads, kv_heads, 128);
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
    EXPECT_EQ(choose_schedule(gpu_input(problem, operands), "auto").schedule, expected)
        << heads << "/" << kv_heads;
  }
}

bool awaits_columns(const Plan& plan) {
  for (const RankPlan& rank : plan.ranks) {
    for (const Block* block : rank.all<Block>()) {
      if (block->arrivals.empty()) return false;
    }
  }
  return true;
}

// One block for all columns, which begins with the rank's own.
TEST(Planner, AllgatherAwaitsColumnsInsideAKernel) {
  AttentionProblem problem = causal_problem(8192, 64, 8, 128);
  for (const int ranks : {2, 4}) {
    const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::zigzag);
    const PlanInput input = flash_input(problem, operands);
    const Plan plan = make_plan(input, Schedule::allgather);
    for (const RankPlan& rank : plan.ranks) {
      const std::vector<const Block*> blocks = rank.all<Block>();
      ASSERT_EQ(blocks.size(), 1U);
      EXPECT_TRUE(rank.all<Reduce>().empty());
      ASSERT_EQ(blocks[0]->arrivals.size(), static_cast<std::size_t>(ranks - 1));
      LocalPosition from = blocks[0]->columns.end() - 8192 / ranks;
      for (const Arrival& arrival : blocks[0]->arrivals) {
        EXPECT_EQ(arrival.columns.end(), from);
        from = arrival.columns.begin;
      }
      EXPECT_EQ(from, blocks[0]->columns.begin);
      // Submitted after all that it awaits, but without waiting for any of it.
      EXPECT_EQ(std::get_if<Block>(&rank.tasks.back().work), blocks[0]);
      EXPECT_TRUE(rank.tasks.back().after.empty());
    }
    EXPECT_EQ(choose_schedule(input, "auto").schedule, Schedule::allgather);
  }
}

TEST(Planner, ColumnsAreAwaitedOnlyWhereKernelTransportAndMemoryPermit) {
  AttentionProblem problem = causal_problem(1024, 8, 2);
  const PlanInput input = flash_input(problem, sequence_operands(problem, 2, LayoutKind::zigzag));
  EXPECT_TRUE(awaits_columns(make_plan(input, Schedule::allgather)));
  EXPECT_FALSE(awaits_columns(make_plan(input, Schedule::ring)));

  PlanInput by_nccl = input;
  by_nccl.prices.model.use_transport("nccl");
  EXPECT_FALSE(awaits_columns(make_plan(by_nccl, Schedule::allgather)));

  PlanInput on_one_gpu = input;
  on_one_gpu.options.await_columns = false;
  EXPECT_FALSE(awaits_columns(make_plan(on_one_gpu, Schedule::allgather)));

  PlanInput little_memory = input;
  little_memory.options.prefetch_bytes = 1024 * 2 * (64 + 64) * 2;
  EXPECT_TRUE(awaits_columns(make_plan(little_memory, Schedule::allgather)));
  --little_memory.options.prefetch_bytes;
  EXPECT_FALSE(awaits_columns(make_plan(little_memory, Schedule::allgather)));

  AttentionProblem wide = problem;
  wide.dtype = DType::float32;
  const ShardedOperands wide_operands = sequence_operands(wide, 2, LayoutKind::zigzag);
  EXPECT_FALSE(awaits_columns(make_plan(flash_input(wide, wide_operands), Schedule::allgather)));
  EXPECT_FALSE(awaits_columns(make_plan(gpu_input(problem, input.operands), Schedule::allgather)));
}

// The reason why a schedule cannot run.
std::string obstacle(const PlanInput& input, std::string_view schedule) {
  try {
    (void)choose_schedule(input, schedule);
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return {};
}

TEST(Planner, LocalWithAShardedSequenceIsRefusedWithTheReason) {
  const AttentionProblem problem = causal_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::contiguous);
  EXPECT_THAT(obstacle(native_input(problem, operands), "local"),
              testing::HasSubstr("sharded along sp"));
}

TEST(Planner, SchedulesHaveNames) {
  EXPECT_EQ(parse_schedule("ring"), Schedule::ring);
  EXPECT_EQ(parse_schedule("double_ring"), Schedule::double_ring);
  EXPECT_EQ(parse_schedule("pass_q"), Schedule::pass_q);
  EXPECT_THROW((void)parse_schedule("rign"), ArgumentError);
}

TEST(Planner, SchedulesSayWhatTheyNeed) {
  AttentionProblem problem = causal_problem(64);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  PlanOptions options;
  options.inner_size = options.ulysses_degree = 3;
  const PlanInput input = native_input(problem, operands, options);
  EXPECT_EQ(obstacle(input, "double_ring"),
            "schedule double_ring cannot run: inner size 3 does not divide the 4 ranks along sp");
  EXPECT_EQ(obstacle(input, "hybrid"),
            "schedule hybrid cannot run: ulysses degree 3 does not divide the 4 ranks along sp");
  EXPECT_EQ(obstacle(input, "ulysses"), "");
  EXPECT_EQ(obstacle(input, "pass_q"), "");
  options.inner_size = options.ulysses_degree = -2;
  const PlanInput negative = native_input(problem, operands, options);
  for (const char* schedule : {"double_ring", "hybrid"}) {
    EXPECT_THAT(obstacle(negative, schedule),
                testing::HasSubstr(" -2 does not divide the 4 ranks"));
  }

  const MeshShape mesh({{"a", 2}, {"b", 2}});
  const auto sharded = [&](const char* query, const char* kv) {
    return sharded_by(problem, mesh, query, kv);
  };
  const ShardedOperands partly = sharded("-,a", "-,a+b");
  EXPECT_THAT(obstacle(native_input(problem, partly), "pass_q"),
              testing::HasSubstr("queries are sharded along a, some but not all axes of keys and "
                                 "values, a+b"));
  EXPECT_THAT(obstacle(native_input(problem, partly), "ulysses"),
              testing::HasSubstr("queries are sharded along a, keys and values along a+b"));
}

TEST(Planner, NamedSchedulesNeedAnAxisForTheSequence) {
  const AttentionProblem problem = causal_problem(64, 4, 4);
  const auto laid_out = [&](const MeshShape& mesh, const char* spec) {
    return sharded_by(problem, mesh, spec, spec);
  };
  const ShardedOperands heads = laid_out(MeshShape({{"tp", 4}}), "-,-,tp,-");
  const ShardedOperands one_rank = laid_out(MeshShape({{"tp", 4}, {"sp", 1}}), "-,sp,tp,-");
  for (const Schedule schedule : kSchedules) {
    const std::string_view name = name_of(schedule);
    EXPECT_EQ(obstacle(native_input(problem, heads), name),
              fmt::format("schedule {} cannot run: it would have nothing to send, as the key/value "
                          "spec -,-,tp,- shards the sequence along no axis of the mesh tp=4; "
                          "expected an axis for it (sp by default), or schedule local or auto",
                          name));
    EXPECT_EQ(obstacle(native_input(problem, one_rank), name), "");
  }
  EXPECT_EQ(obstacle(native_input(problem, heads), "local"), "");
  EXPECT_EQ(choose_schedule(native_input(problem, heads), "auto").schedule, Schedule::local);
  const std::vector<ConsideredVariant> named = variants_for(native_input(problem, heads), "ring");
  ASSERT_THAT(named, testing::SizeIs(1));
  EXPECT_THAT(named[0].obstacle, testing::HasSubstr("no axis"));
}

// A bias that would be sent with the queries, and one that all heads share and every rank would
// gather, count in what a schedule takes.
TEST(Planner, AutoKeepsALargeBiasWhereItIs) {
  AttentionProblem problem = causal_problem(8192, 32, 32);
  const auto seconds = [&](Schedule schedule) {
    const PlanInput input = gpu_input(problem, sequence_operands(problem, 4, LayoutKind::zigzag));
    return predicted_seconds(make_plan(input, schedule), input.prices);
  };
  problem.bias = Extents{1, 32, 1, 8192};
  const double ulysses = seconds(Schedule::ulysses);
  const double ring = seconds(Schedule::ring);
  for (const std::int64_t heads : {1, 32}) {
    problem.bias = Extents{1, heads, 8192, 8192};
    EXPECT_GT(seconds(Schedule::ulysses) - ulysses, seconds(Schedule::ring) - ring);
  }
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  const Schedule chosen = choose_schedule(gpu_input(problem, operands), "auto").schedule;
  EXPECT_NE(chosen, Schedule::ulysses);
  EXPECT_NE(chosen, Schedule::pass_q);
  problem.bias.reset();
  problem.dense_mask = Extents{1, 1, 8192, 8192};
  const ShardedOperands shared = sequence_operands(problem, 4, LayoutKind::zigzag);
  for (const ConsideredVariant& one : variants_for(gpu_input(problem, shared), "auto")) {
    if (one.variant.schedule != Schedule::ulysses && one.variant.schedule != Schedule::hybrid) {
      continue;
    }
    EXPECT_EQ(one.pointless,
              "the heads share a dense mask, so every rank would need all of its rows");
  }
}

// A flash kernel computes whole tiles of rows. cuDNN splits the keys of a single row, but not to
// the same bits every time: it does that only where it is named.
TEST(Planner, AFewRowsOnGpusGoToCudnnUnlessTheirBitsVary) {
  static const Registry registry = Registry::standard();
  AttentionProblem problem = unmasked_problem(1 << 17, 64, 8, 128);
  const Implementation& sdpa = registry.get("sdpa");
  const std::vector<const Implementation*> both{&registry.get("flash_attn2"), &sdpa};
  for (const auto& [rows, candidates, expected] : {std::tuple{1, both, "flash_attn2"},
                                                   {1, {&sdpa}, "sdpa"},
                                                   {16, both, "sdpa"},
                                                   {1 << 14, both, "flash_attn2"}}) {
    problem.shape.query_length = rows;
    const PlanInput input = make_plan_input(
        problem, sequence_operands(problem, 1, LayoutKind::contiguous), candidates, Place::cuda(0),
        CostModel::hopper_nvlink(), PlanOptions::for_place(Place::cuda(0)));
    const RankPlan plan = make_rank_plan(input, Schedule::local, 0);
    for (const Block* block : plan.all<Block>()) {
      EXPECT_EQ(plan.implementation_of(*block), expected) << rows;
    }
  }
}

// Ranks hold a chunk each, so nothing is sent but sink tokens; the flash kernel computes it all, at
// the price of what is visible.
TEST(Planner, ChunksOfTheirOwnAreNotSent) {
  AttentionProblem problem = causal_problem(16384, 8, 2, 128);
  const auto plan_of = [&] {
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
    const PlanInput input = flash_input(problem, operands);
    Plan plan = make_plan(input, Schedule::ring);
    const double seconds = predicted_seconds(plan, input.prices);
    return std::pair(std::move(plan), seconds);
  };
  const double causal = plan_of().second;
  problem.mask.set_chunk(4096);
  const auto [chunks, seconds] = plan_of();
  for (const RankPlan& rank : chunks.ranks) EXPECT_EQ(rank.bytes_sent(), 0);
  EXPECT_LT(seconds, causal / 3);
  problem.mask.set_sink_tokens(64);
  const Plan sinks = plan_of().first;
  const std::int64_t most = 3 * 64 * problem.shape.kv_heads * 2 * 128 * 2;  // to three ranks
  EXPECT_GT(sinks.ranks[0].bytes_sent(), 0);
  for (const RankPlan& rank : sinks.ranks) EXPECT_LE(rank.bytes_sent(), most);
}

TEST(Planner, ManyQueriesGoRound) {
  AttentionProblem problem = causal_problem(64, 4, 2);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  const Plan few = make_plan(native_input(problem, operands), Schedule::pass_q);
  EXPECT_EQ(few.ranks[0].all<Exchange>().size(), 2U);
  EXPECT_EQ(few.ranks[0].all<Block>().size(), 1U);
  problem = causal_problem(1 << 16, 4, 2);
  const ShardedOperands more = sequence_operands(problem, 4, LayoutKind::zigzag);
  const Plan many = make_plan(native_input(problem, more), Schedule::pass_q);
  EXPECT_EQ(many.ranks[0].all<Exchange>().size(), 5U);
  EXPECT_EQ(many.ranks[0].all<Block>().size(), 4U);
}

// A rank holds as many partial results of its own rows as the options allow (two at least), two
// more that are on their way, and a sum. For the rows of other ranks, it holds the results of the
// last two hops.
TEST(Planner, PartialResultsOfManyHopsAreCombinedOnTheWay) {
  constexpr int kRanks = 8;
  constexpr std::int64_t kLength = 600;
  AttentionProblem problem = unmasked_problem(kLength, 64, 2);
  const ShardedOperands operands = sequence_operands(problem, kRanks, LayoutKind::contiguous);
  const std::int64_t part = kLength / kRanks * 64 * problem.shape.value_dim * 4;
  for (const auto& [limit, most] : {std::pair{std::int64_t{0}, 2}, {9 * part, 4}}) {
    const PlanOptions options{.result_bytes = limit};
    const Plan plan = make_plan(native_input(problem, operands, options), Schedule::pass_q);
    expect_valid(plan, operands);
    const RankPlan& rank = plan.ranks[3];
    std::set<int> memory;
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const Buffer& buffer = rank.buffers[i];
      if (buffer.kind != BufferKind::exchange || buffer.contents.front() != Content::output) {
        continue;
      }
      memory.insert(rank.memory_of(static_cast<int>(i)));
    }
    EXPECT_EQ(memory.size(), static_cast<std::size_t>(most) + 3 + 2);
  }
}

// By many ranks, or where they are large, partial results are combined in pairs.
TEST(Planner, PartialResultsOfManyRanksTakeLogPSteps) {
  for (const auto& [ranks, length, steps] :
       {std::tuple{8, 3, 1}, {9, 3, 5}, {16, 3, 4}, {12, 3, 5}, {4, 4096, 2}, {3, 4096, 3}}) {
    AttentionProblem problem = unmasked_problem(64, 4, 2);
    problem.shape.query_length = length;
    const ShardedOperands operands = sharded_by(problem, MeshShape({{"sp", ranks}}), "-", "-,sp");
    const Plan plan = make_plan(native_input(problem, operands), Schedule::pass_q);
    std::size_t most = 0;
    for (const RankPlan& rank : plan.ranks) {
      most = std::max(most, rank.all<Exchange>().size());
    }
    EXPECT_EQ(most, static_cast<std::size_t>(steps)) << ranks << " ranks, " << length;
    if (length < 64) expect_valid(plan, operands);
  }
}

TEST(Planner, FewQueriesGoToALongCache) {
  AttentionProblem problem = causal_problem(1 << 16);
  problem.shape.query_length = 1;
  problem.mask.set_offset((1 << 16) - 1);
  for (const char* query : {"-", "-,sp"}) {
    const ShardedOperands operands = sharded_by(problem, MeshShape({{"sp", 4}}), query, "-,sp");
    const PlanInput input = gpu_input(problem, operands);
    const ScheduleChoice choice = choose_schedule(input, "auto");
    EXPECT_EQ(choice.schedule, Schedule::pass_q);
    const Plan plan = make_plan(input, choice.schedule);
    // Partial results to all at once; or the query to all, and its results back.
    EXPECT_EQ(plan.ranks[0].all<Exchange>().size(), query == std::string("-") ? 1U : 2U);
    EXPECT_LT(plan.ranks[0].bytes_sent(), 1 << 20);
  }
}

TEST(Planner, BlocksGoToTheFastestThatTakesThem) {
  const AttentionProblem problem = causal_problem(4096, 8, 2);
  for (const double rate : {1e12, 1e15}) {
    PlanInput input = gpu_input(problem, sequence_operands(problem, 2, LayoutKind::zigzag));
    set_rate(input.prices, "native", rate);
    const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
    for (const Block* block : plan.all<Block>()) {
      EXPECT_EQ(plan.implementation_of(*block), rate > 1e14 ? "native" : "sdpa");
    }
    const auto reasons = passed_over_blocks(input, plan);
    ASSERT_EQ(reasons.size(), rate > 1e14 ? 1U : 0U);
    for (const auto& [name, reason] : reasons) {
      EXPECT_NE(reason.find("predicted to be slower"), std::string::npos) << reason;
    }
  }
}

// A kernel that cannot write into the caller's output, say because of its strides, still computes
// the block into a buffer of the plan.
TEST(Planner, ARefusalToRoundIsNoRefusalOfTheBlock) {
  const AttentionProblem problem = causal_problem(96, 4, 2);
  const auto into_output = [](const RankPlan& plan, const Block& block) {
    return plan.buffer(block.result.output.buffer).kind == BufferKind::caller;
  };
  for (const int ranks : {1, 2}) {
    PlanInput input = flash_input(problem, sequence_operands(problem, ranks, LayoutKind::zigzag));
    input.prices.model.merge_bytes_per_second = 1;  // whatever another call costs
    const Schedule schedule = ranks == 1 ? Schedule::local : Schedule::ring;
    for (const RankPlan& rank : make_plan(input, schedule).ranks) {
      for (const Block* block : rank.all<Block>()) {
        if (!into_output(rank, *block)) continue;
        refuse(input,
               {{"flash_attn2", block->row_positions, block->column_positions,
                 rank.global(block->batches), block->heads.count, block->full, "strides", true}});
      }
    }
    EXPECT_FALSE(input.refusals.empty());
    input.refusals = parse_refusals(to_json(input.refusals));
    const Plan plan = make_plan(input, schedule);
    expect_valid(plan, input.operands, 1);
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_FALSE(rank.all<Reduce>().empty());
      for (const Block* block : rank.all<Block>()) EXPECT_FALSE(into_output(rank, *block));
    }
  }
}

// Combining results costs more than continuing states. In short sequences this outweighs a slightly
// slower kernel.
TEST(Planner, ResultsThatAreHandedOverCount) {
  for (const auto& [length, expected] :
       {std::pair{std::int64_t{1} << 13, "flash_attn2"}, {std::int64_t{1} << 16, "sdpa"}}) {
    AttentionProblem problem = causal_problem(length, 64, 8, 128);
    const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::zigzag);
    const Registry registry = Registry::standard();
    PlanInput input = make_plan_input(
        problem, operands, {&registry.get("sdpa"), &registry.get("flash_attn2")}, Place::cuda(0),
        CostModel::hopper_nvlink(), PlanOptions::for_place(Place::cuda(0)));
    set_rate(input.prices, "sdpa", 600e12);
    set_rate(input.prices, "flash_attn2", 590e12);
    const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
    for (const Block* block : plan.all<Block>()) {
      EXPECT_EQ(plan.implementation_of(*block), expected);
    }
  }
}

TEST(Planner, RefusedBlocksGoToTheNextCandidateOnly) {
  AttentionProblem problem = causal_problem(1024, 8, 2);
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::contiguous);
  PlanInput input = gpu_input(problem, operands);
  const RankPlan before = make_rank_plan(input, Schedule::ring, 1);
  const auto names = [](const RankPlan& plan) {
    std::vector<std::string> result;
    for (const Block* block : plan.all<Block>()) {
      result.push_back(plan.implementation_of(*block));
    }
    return result;
  };
  EXPECT_EQ(names(before), (std::vector<std::string>{"sdpa", "sdpa"}));
  const Block& own = *before.all<Block>().front();
  Refusal refusal{"sdpa",          own.row_positions, own.column_positions, {0, 1},
                  own.heads.count, own.full,          "no \"engine\""};
  // A refusal does not concern other numbers of batches, nor partly masked blocks if the refused
  // one was full.
  refusal.batches.count = 2;
  refuse(input, {refusal});
  EXPECT_EQ(names(make_rank_plan(input, Schedule::ring, 1)), names(before));
  refusal.batches = before.global(own.batches);
  refusal.full = !own.full;
  input.refusals.clear();
  refuse(input, {refusal});
  EXPECT_EQ(names(make_rank_plan(input, Schedule::ring, 1)), names(before));
  refusal.full = own.full;
  input.refusals.clear();
  refuse(input, parse_refusals(to_json(std::vector{refusal})));
  const RankPlan after = make_rank_plan(input, Schedule::ring, 1);
  EXPECT_EQ(names(after), (std::vector<std::string>{"native", "sdpa"}));
  const auto reasons = passed_over_blocks(input, after);
  ASSERT_EQ(reasons.size(), 1U);
  EXPECT_EQ(reasons[0].first, "sdpa");
  EXPECT_EQ(reasons[0].second, "1 of 2 blocks of rank 1: no \"engine\"");
  EXPECT_THROW((void)parse_refusals("[{]"), InternalError);
}

TEST(Planner, ABlockThatNobodyTakesIsAnErrorWithEveryReason) {
  AttentionProblem problem = causal_problem(1024, 8, 2);
  PlanInput input = gpu_input(problem, sequence_operands(problem, 2, LayoutKind::contiguous));
  input.candidates.pop_back();
  const RankPlan plan = make_rank_plan(input, Schedule::ring, 0);
  const Block& own = *plan.all<Block>().front();
  input.refusals = {{"sdpa", own.row_positions, own.column_positions, plan.global(own.batches),
                     own.heads.count, own.full, "tired"}};
  EXPECT_THAT(
      test::message_of<UnsupportedError>([&] { (void)make_rank_plan(input, Schedule::ring, 0); }),
      testing::HasSubstr("sdpa: tired"));
}

// The blocks of some schedules need more memory than vanilla takes; others have smaller ones.
TEST(Planner, AutoPassesOverSchedulesWhoseBlocksNobodyTakes) {
  static const Registry registry = Registry::standard();
  AttentionProblem problem;
  problem.shape = {1, 32 << 10, 32 << 10, 4, 1, 64, 64};
  problem.dtype = DType::float64;
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  const PlanInput input = make_plan_input(problem, operands, {&registry.get("vanilla")},
                                          Place::host(), CostModel::cpu_core(), {});
  EXPECT_THROW((void)make_rank_plan(input, Schedule::allgather, 0), UnsupportedError);
  const ScheduleChoice choice = choose_schedule(input, "auto");
  EXPECT_NO_THROW((void)make_rank_plan(input, choice.schedule, 0));
  const auto allgather =
      std::find_if(choice.passed_over.begin(), choice.passed_over.end(),
                   [](const auto& one) { return one.schedule == Schedule::allgather; });
  ASSERT_NE(allgather, choice.passed_over.end());
  EXPECT_NE(allgather->reason.find("vanilla"), std::string::npos) << allgather->reason;
}

TEST(ShardedOperands, RefusesWhatCannotLieTogether) {
  const AttentionProblem problem = causal_problem(64, 8, 2);
  const MeshShape mesh({{"dp", 1}, {"tp", 4}, {"sp", 2}});
  const auto shard = [&](const char* query, const char* kv) {
    return shard_operands(
        problem, mesh,
        {PartitionSpec::parse(query), PartitionSpec::parse(kv), LayoutKind::contiguous, 1});
  };
  EXPECT_THROW(shard("dp,sp,tp", "-,sp,tp"), ArgumentError);
  EXPECT_THROW(shard("dp,sp,tp", "dp,sp"), ArgumentError);
  EXPECT_THROW(shard("-,-,-,sp", "-,-,-,sp"), ArgumentError);
  EXPECT_THROW(shard("-,sp,sp", "-,sp,sp"), DuplicateSpecError);
  EXPECT_THROW(shard("-,xx", "-,xx"), UnknownAxisError);
  // Two kv heads on four ranks: each of them is shared by two.
  const ShardedOperands operands = shard("dp,sp,tp", "dp,sp,tp");
  for (int rank = 0; rank < 8; ++rank) {
    const std::int64_t first_head =
        operands.query.positions(rank, 2).global(LocalPosition(0)).value();
    EXPECT_EQ(operands.key.positions(rank, 2).global(LocalPosition(0)).value(), first_head / 4);
    EXPECT_EQ(operands.key.local_shape(rank)[2], 1);
  }
}

}  // namespace
}  // namespace annulus::ring
