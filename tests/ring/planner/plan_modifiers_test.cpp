// Sinks, bias, dense mask and unnormalised outputs in plans: who reads or adds them, what travels,
// and what reports say.
#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/attention/modifiers.hpp>
#include <annulus/ring/planner.hpp>

#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

// The last rows see nothing.
AttentionProblem with_empty_rows(DType dtype) {
  AttentionProblem problem = causal_problem(37, 4, 2);
  problem.dtype = dtype;
  problem.mask.set_window(9, -1);
  problem.mask.set_kv_lengths({20});
  return problem;
}

// With any kernel, whatever is folded on the way, and for rows without any computation.
TEST(PlanModifiers, SinksJoinEveryRowOnce) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const Schedule schedule : kSchedules) {
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for (const bool few : {true, false}) {
          AttentionProblem problem = with_empty_rows(dtype);
          problem.sinks = Sinks({4, 1}, {1, 2, 3, 4});
          const ShardedOperands operands =
              sequence_operands(problem, ranks, LayoutKind::contiguous);
          const PlanOptions options{.gather_bytes = few ? 1 : std::int64_t{1} << 30,
                                    .result_bytes = few ? 0 : std::int64_t{1} << 30,
                                    .lse_dtype = DType::float32};
          for (const PlanInput& input :
               {native_input(problem, operands, options), gpu_input(problem, operands, options),
                flash_input(problem, operands, options)}) {
            const Plan plan = make_plan(input, schedule);
            expect_valid(plan, operands);
            const auto json = nlohmann::json::parse(to_json(plan));
            // A rank without heads adds none.
            int with_sinks = 0;
            for (const auto& rank : json["ranks"]) {
              for (const auto& task : rank["tasks"]) with_sinks += task.value("sinks", false);
            }
            EXPECT_GE(with_sinks, std::min(ranks, 4));
            EXPECT_EQ(json["modifiers"], "sinks [4, 1]");
            EXPECT_NE(to_text(plan).find(", sinks [4, 1]\n"), std::string::npos);
            EXPECT_NE(to_text(plan, ranks).find("the sinks"), std::string::npos);
          }
        }
      }
    }
  }
}

// With any kernel, whatever is folded on the way, and for rows without any computation.
TEST(PlanModifiers, EveryRowOfAnUnnormalisedOutputIsCompletedOnce) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const Schedule schedule : kSchedules) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64}) {
        for (const bool few : {true, false}) {
          AttentionProblem problem = with_empty_rows(dtype);
          problem.normalize_output = false;
          if (few) problem.sinks = Sinks({1}, {1});
          const ShardedOperands operands =
              sequence_operands(problem, ranks, LayoutKind::contiguous);
          PlanOptions options{.gather_bytes = few ? 1 : std::int64_t{1} << 30,
                              .result_bytes = few ? 0 : std::int64_t{1} << 30};
          if (few) options.lse_dtype = DType::float32;
          // Blocks that continue states, or round results, must not complete rows either.
          expect_valid(make_plan(native_input(problem, operands, options), schedule), operands);
          if (dtype == DType::float64) continue;
          expect_valid(make_plan(flash_input(problem, operands, options), schedule), operands);
        }
      }
    }
  }
}

TEST(PlanModifiers, SaysThatTheOutputIsUnnormalised) {
  AttentionProblem problem = causal_problem(64);
  problem.normalize_output = false;
  const ShardedOperands operands = sequence_operands(problem, 2, LayoutKind::zigzag);
  const Plan plan = make_plan(native_input(problem, operands), Schedule::ring);
  const auto json = nlohmann::json::parse(to_json(plan));
  EXPECT_EQ(json["modifiers"], "unnormalised");
  EXPECT_EQ(json["version"], 3);
  const auto& rank = json["ranks"][0];
  EXPECT_EQ(rank["buffers"][4]["contents"][0], "sum");
  EXPECT_EQ(rank["buffers"][5]["contents"][0], "maximum");
  const auto& last = rank["tasks"].back();
  EXPECT_EQ(last["kind"], "reduce");
  EXPECT_EQ(last["unnormalised"], true);
  EXPECT_EQ(last["into"]["lse"], 4);
  EXPECT_EQ(last["into"]["maximum"], 5);
  EXPECT_NE(to_text(plan, 1).find("reduce (softmax, unnormalised) into buffer 3"),
            std::string::npos);
  // The plan of a normalised one says nothing of it.
  problem.normalize_output = true;
  const std::string defaults = to_json(make_plan(native_input(problem, operands), Schedule::ring));
  EXPECT_EQ(defaults.find("maximum"), std::string::npos);
  EXPECT_EQ(defaults.find("unnormalised"), std::string::npos);
}

// A reduction has room for the sinks beside the maximum number of results.
TEST(PlanModifiers, SinksFitBesideManyResults) {
  AttentionProblem problem = unmasked_problem(37, 1, 1);
  problem.sinks = Sinks({1}, {1});
  const ShardedOperands operands =
      sequence_operands(problem, kMaximumParts - 1, LayoutKind::contiguous);
  const PlanOptions options{.result_bytes = std::int64_t{1} << 30};
  const Plan plan = make_plan(native_input(problem, operands, options), Schedule::ring);
  expect_valid(plan, operands);
  std::size_t most = 0;
  for (const Reduce* reduce : plan.ranks[0].all<Reduce>()) {
    most = std::max(most, reduce->parts.size() + (reduce->sinks ? 1 : 0));
  }
  EXPECT_EQ(most, static_cast<std::size_t>(kMaximumParts));
}

TEST(PlanModifiers, RowsOfBiasAndMaskGoWhereTheQueriesGo) {
  constexpr std::int64_t kLength = 37;
  using Scores = std::optional<Extents>;
  const std::vector<std::pair<Scores, Scores>> forms{
      {Extents{2, 6, kLength, kLength}, {}},
      {Extents{1, 6, kLength, kLength}, Extents{2, 1, kLength, kLength}},
      {Extents{2, 1, kLength, 1}, Extents{1, 6, 1, kLength}},
      {Extents{1, 1, 1, kLength}, Extents{1, 6, kLength, 1}},
      {Extents{2, 6, 1, 1}, Extents{1, 1, kLength, kLength}}};
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced}) {
      for (const Schedule schedule : {Schedule::ulysses, Schedule::hybrid, Schedule::pass_q}) {
        for (const auto& [bias, mask] : forms) {
          AttentionProblem problem = causal_problem(kLength, 6, 3);
          problem.shape.batch = 2;
          problem.bias = bias;
          problem.dense_mask = mask;
          SCOPED_TRACE(testing::Message()
                       << ranks << " ranks, " << name_of(layout) << ", " << name_of(schedule)
                       << ", " << mask_and_modifiers_text(problem));
          const ShardedOperands operands = sequence_operands(problem, ranks, layout);
          PlanOptions options{.head_group_bytes = 1};
          if (ranks % 2 == 0) options.ulysses_degree = 2;
          expect_valid(make_plan(native_input(problem, operands, options), schedule), operands);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Larger rows go round rather than to all ranks at once.
TEST(PlanModifiers, RowsOfBiasAndMaskGoRound) {
  constexpr std::int64_t kLength = 603;
  for (const int ranks : {3, 4}) {
    for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
      for (const bool all_rows : {false, true}) {
        AttentionProblem problem = causal_problem(kLength, 16, 4);
        problem.bias = Extents{1, 16, kLength, kLength};
        problem.dense_mask = Extents{1, 1, all_rows ? 1 : kLength, kLength};
        const ShardedOperands operands = sequence_operands(problem, ranks, layout);
        const Plan plan = make_plan(native_input(problem, operands), Schedule::pass_q);
        expect_valid(plan, operands);
        const auto exchanges = plan.ranks.front().all<Exchange>();
        EXPECT_EQ(exchanges.size(), static_cast<std::size_t>(ranks + 1));
      }
    }
  }
}

// Bytes of the buffers of a content that are not the caller's.
std::int64_t bytes_beside_the_callers(const RankPlan& plan, Content content) {
  std::map<int, std::int64_t> memory;
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    if (buffer.kind == BufferKind::caller || buffer.contents.front() != content) continue;
    std::int64_t& bytes = memory[plan.memory_of(static_cast<int>(i))];
    bytes = std::max(bytes, buffer.tokens.count * plan.token_bytes(buffer));
  }
  std::int64_t total = 0;
  for (const auto& [index, bytes] : memory) total += bytes;
  return total;
}

// A rank holds its own part and what is under way: two head groups, or the blocks of two hops, each
// to be sent and received. What all heads share is gathered once.
TEST(PlanModifiers, RowsOfABiasAreHeldAsTheyAreNeeded) {
  constexpr std::int64_t kLength = 4096;
  constexpr std::int64_t kHeads = 32;
  constexpr std::int64_t kRanks = 4;
  constexpr std::int64_t kPart = kHeads * (kLength / kRanks) * kLength * 4;
  AttentionProblem problem = unmasked_problem(kLength, kHeads, 8);
  const auto plan_of = [&](Schedule schedule) {
    const ShardedOperands operands = sequence_operands(problem, kRanks, LayoutKind::contiguous);
    return make_rank_plan(native_input(problem, operands), schedule, 1);
  };
  const std::int64_t before = plan_of(Schedule::ulysses).bytes_received();
  const std::int64_t before_round = plan_of(Schedule::pass_q).bytes_received();

  problem.bias = Extents{1, kHeads, kLength, kLength};
  const RankPlan ulysses = plan_of(Schedule::ulysses);
  EXPECT_EQ(ulysses.bytes_received() - before, kPart / kRanks * (kRanks - 1));
  constexpr std::int64_t kGroups = 8;
  EXPECT_EQ(bytes_beside_the_callers(ulysses, Content::bias),
            2 * (kPart + kPart / kRanks * (kRanks - 1)) / kGroups);
  const RankPlan pass_q = plan_of(Schedule::pass_q);
  EXPECT_EQ(pass_q.bytes_received() - before_round, kPart / kRanks * (kRanks - 1));
  EXPECT_EQ(bytes_beside_the_callers(pass_q, Content::bias), 4 * kPart / kRanks);

  problem.bias = Extents{1, 1, kLength, kLength};
  const RankPlan shared = plan_of(Schedule::ulysses);
  EXPECT_EQ(shared.bytes_received() - before, kPart / kHeads * (kRanks - 1));
  EXPECT_EQ(bytes_beside_the_callers(shared, Content::bias), kPart / kHeads * (2 * kRanks - 1));
  problem.bias = Extents{1, kHeads, 1, kLength};
  EXPECT_EQ(plan_of(Schedule::ulysses).bytes_received(), before);
}

TEST(PlanModifiers, ReportsShowTheKeysOfAPartOfABias) {
  AttentionProblem problem = causal_problem(16, 2, 2);
  problem.bias = Extents{1, 2, 16, 16};
  const Plan plan = sequence_plan(problem, 2, LayoutKind::zigzag, Schedule::pass_q);
  EXPECT_NE(to_text(plan, 1).find("bias float32, tokens 0:8, heads 0:2, columns 4:8+8:12"),
            std::string::npos)
      << to_text(plan, 1);
  EXPECT_NE(to_json(plan).find(R"("columns": "4:8+8:12")"), std::string::npos);
}

// Every block reads bias and mask, no message holds them, and a rank holds only its own rows.
TEST(PlanModifiers, InARingBiasAndMaskLieByTheRowsAndDoNotTravel) {
  constexpr int kRanks = 4;
  AttentionProblem problem = causal_problem(64, 4, 2);
  const Plan without = sequence_plan(problem, kRanks, LayoutKind::zigzag, Schedule::ring);
  problem.bias = Extents{1, 4, 64, 64};
  problem.dense_mask = Extents{1, 1, 1, 64};
  const ShardedOperands operands = sequence_operands(problem, kRanks, LayoutKind::zigzag);
  EXPECT_EQ(to_string(operands.bias->spec()), "-,-,sp,-");
  EXPECT_EQ(operands.bias->positions(1, 2), operands.query.positions(1, 1));
  EXPECT_EQ(operands.dense_mask->local_shape(1), (Extents{1, 1, 1, 64}));
  const Plan plan = make_plan(native_input(problem, operands), Schedule::ring);
  for (std::size_t r = 0; r < kRanks; ++r) {
    const RankPlan& rank = plan.ranks[r];
    EXPECT_EQ(rank.bytes_received(), without.ranks[r].bytes_received());
    EXPECT_EQ(
        rank.buffer_bytes(BufferKind::caller) - without.ranks[r].buffer_bytes(BufferKind::caller),
        4 * 16 * 64 * 4 + 64);
    for (const Block* block : rank.all<Block>()) {
      EXPECT_EQ(rank.buffer(block->bias).contents, std::vector{Content::bias});
      EXPECT_EQ(rank.buffer(block->dense_mask).contents, std::vector{Content::dense_mask});
    }
    for (const Block* block : without.ranks[r].all<Block>()) {
      EXPECT_EQ(block->bias, -1);
      EXPECT_EQ(block->dense_mask, -1);
    }
  }
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(contains(to_text(plan, 1), "dense mask [1, 1, 1, 64], bias [1, 4, 64, 64]"));
  EXPECT_TRUE(contains(to_json(plan), R"("dense_mask": 6)"));
  EXPECT_TRUE(contains(to_json(plan), R"("bias": 5)"));
}

}  // namespace
}  // namespace annulus::ring
