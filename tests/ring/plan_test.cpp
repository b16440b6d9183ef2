#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>
#include <annulus/verification/random_problem.hpp>

#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

// Plays a plan with the global position of every token in place of its key and value, and notes
// which pairs each rank computes. A slot that holds nothing is −1.
class PlanPlayer {
 public:
  explicit PlanPlayer(const Plan& plan, const ShardedOperands& operands)
      : plan_(plan), operands_(operands), buffers_(plan.ranks.size()), pairs_(plan.ranks.size()) {}

  void play() {
    std::size_t steps = 0;
    for (const RankPlan& rank : plan_.ranks) {
      start(rank);
      steps = std::max(steps, rank.steps.size());
    }
    for (std::size_t s = 0; s < steps; ++s) {
      // Transfers of a step run under its blocks, so they read and write what blocks of the same
      // step must not touch: apply the sends first, the blocks next, and the arrivals last.
      for (const RankPlan& rank : plan_.ranks) {
        if (s < rank.steps.size()) send(rank, rank.steps[s]);
      }
      for (const RankPlan& rank : plan_.ranks) {
        if (s < rank.steps.size()) compute(rank, rank.steps[s]);
      }
      for (const RankPlan& rank : plan_.ranks) {
        if (s < rank.steps.size()) receive(rank, rank.steps[s]);
      }
    }
    for (const auto& [route, messages] : wires_) {
      EXPECT_TRUE(messages.empty())
          << "rank " << route.first << " sent to rank " << route.second << " what nobody received";
    }
  }

  // Every visible pair of every head exactly once, on every rank that holds its row.
  void expect_complete() const {
    const AttentionProblem& problem = plan_.problem;
    for (const RankPlan& rank : plan_.ranks) {
      const PositionRanges rows = operands_.query.positions(rank.rank, 1);
      const auto& counts = pairs_[static_cast<std::size_t>(rank.rank)];
      for (std::int64_t b = 0; b < rank.local.batch; ++b) {
        for (std::int64_t h = 0; h < rank.local.heads; ++h) {
          for (std::int64_t i = 0; i < rows.size(); ++i) {
            const GlobalPosition row = rows.global(LocalPosition(i));
            for (std::int64_t j = 0; j < problem.shape.kv_length; ++j) {
              if (!problem.mask.visible(rank.first_batch + b, rank.first_head + h, row,
                                        GlobalPosition(j))) {
                continue;
              }
              const auto found = counts.find({h, row.value(), j});
              ASSERT_TRUE(found != counts.end() && found->second == 1)
                  << "rank " << rank.rank << " computes row " << row.value() << ", column " << j
                  << ", head " << h << " " << (found == counts.end() ? 0 : found->second)
                  << " times";
            }
          }
        }
      }
    }
  }

 private:
  using Slots = std::vector<std::int64_t>;
  using Pairs = std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, int>;

  Slots& slots(const RankPlan& rank, int buffer) {
    const int reused = rank.buffers[static_cast<std::size_t>(buffer)].reuses;
    if (reused >= 0) return slots(rank, reused);
    return buffers_[static_cast<std::size_t>(rank.rank)][buffer];
  }

  int mesh_rank(const RankPlan& rank, int group_rank) const {
    return plan_.mesh.group(rank.rank, plan_.sequence_axes)[static_cast<std::size_t>(group_rank)];
  }

  void start(const RankPlan& rank) {
    const PositionRanges columns = operands_.key.positions(rank.rank, 1);
    for (std::size_t i = 0; i < rank.buffers.size(); ++i) {
      const KvBuffer& buffer = rank.buffers[i];
      Slots& held = slots(rank, static_cast<int>(i));
      if (buffer.reuses >= 0) {
        ASSERT_LE(buffer.slots, static_cast<std::int64_t>(held.size()));
        continue;
      }
      held.assign(static_cast<std::size_t>(buffer.slots), -1);
      if (buffer.kind == BufferKind::receive) continue;
      ASSERT_EQ(buffer.slots, buffer.source.count);
      for (std::int64_t s = 0; s < buffer.slots; ++s) {
        held[static_cast<std::size_t>(s)] = columns.global(buffer.source.begin + s).value();
      }
    }
  }

  void send(const RankPlan& rank, const Step& step) {
    for (const Transfer& transfer : step.sends) {
      const KvBuffer& buffer = rank.buffers[static_cast<std::size_t>(transfer.buffer)];
      EXPECT_NE(buffer.kind, BufferKind::input);
      EXPECT_GT(transfer.bytes, 0);
      EXPECT_EQ(transfer.bytes,
                transfer.slots.count * rank.slot_bytes(buffer, plan_.problem.dtype));
      const Slots& held = slots(rank, transfer.buffer);
      ASSERT_LE(transfer.slots.end().value(), static_cast<std::int64_t>(held.size()));
      const auto begin = held.begin() + transfer.slots.begin.value();
      const Slots message(begin, begin + transfer.slots.count);
      EXPECT_EQ(std::count(message.begin(), message.end(), -1), 0) << "an empty slot was sent";
      wires_[{rank.rank, mesh_rank(rank, transfer.peer)}].push_back(
          {message, buffer.kv_heads, transfer.origin});
    }
  }

  void receive(const RankPlan& rank, const Step& step) {
    for (const Transfer& transfer : step.receives) {
      auto& wire = wires_[{mesh_rank(rank, transfer.peer), rank.rank}];
      ASSERT_FALSE(wire.empty()) << "rank " << rank.rank << " waits for what nobody sends";
      const Message message = wire.front();
      wire.pop_front();
      const KvBuffer& buffer = rank.buffers[static_cast<std::size_t>(transfer.buffer)];
      ASSERT_EQ(message.slots.size(), static_cast<std::size_t>(transfer.slots.count));
      EXPECT_EQ(message.heads, buffer.kv_heads);
      EXPECT_EQ(message.origin, transfer.origin);
      // No block of this step may compute on what arrives meanwhile, and nothing may be sent from
      // it.
      for (const Block& block : step.blocks) {
        EXPECT_NE(&slots(rank, block.buffer), &slots(rank, transfer.buffer));
      }
      for (const Transfer& sent : step.sends) {
        EXPECT_NE(&slots(rank, sent.buffer), &slots(rank, transfer.buffer));
      }
      std::copy(message.slots.begin(), message.slots.end(),
                slots(rank, transfer.buffer).begin() + transfer.slots.begin.value());
    }
  }

  void compute(const RankPlan& rank, const Step& step) {
    const PositionRanges rows = operands_.query.positions(rank.rank, 1);
    Pairs& counts = pairs_[static_cast<std::size_t>(rank.rank)];
    for (const Block& block : step.blocks) {
      ASSERT_EQ(block.row_positions, rows.slice(block.rows));
      const Slots& held = slots(rank, block.buffer);
      ASSERT_EQ(block.column_positions.size(), block.slots.count);
      std::int64_t visible = 0;
      for (std::int64_t s = 0; s < block.slots.count; ++s) {
        const std::int64_t column = block.column_positions.global(LocalPosition(s)).value();
        ASSERT_EQ(held[static_cast<std::size_t>(block.slots.begin.value() + s)], column);
        for (std::int64_t i = 0; i < block.rows.count; ++i) {
          const GlobalPosition row = block.row_positions.global(LocalPosition(i));
          for (std::int64_t b = 0; b < rank.local.batch; ++b) {
            visible += static_cast<int>(
                plan_.problem.mask.visible(rank.first_batch + b, 0, row, GlobalPosition(column)));
          }
          for (std::int64_t h = 0; h < block.heads.count; ++h) {
            ++counts[{block.heads.begin + h, row.value(), column}];
          }
        }
      }
      EXPECT_EQ(block.pairs, visible);
      EXPECT_EQ(block.full, visible == block.rows.count * block.slots.count * rank.local.batch);
    }
  }

  struct Message {
    Slots slots;
    HeadRange heads;
    int origin;
  };
  const Plan& plan_;
  const ShardedOperands& operands_;
  std::vector<std::map<int, Slots>> buffers_;
  std::vector<Pairs> pairs_;
  std::map<std::pair<int, int>, std::deque<Message>> wires_;
};

void expect_valid(const Plan& plan, const ShardedOperands& operands) {
  PlanPlayer player(plan, operands);
  player.play();
  player.expect_complete();
}

// Rows of a rank are first written, then merged into: merge flags must say which.
void expect_merge_flags(const Plan& plan) {
  for (const RankPlan& rank : plan.ranks) {
    std::set<std::pair<std::int64_t, std::int64_t>> touched;
    for (const Step& step : rank.steps) {
      for (const Block& block : step.blocks) {
        bool any = false;
        for (std::int64_t h = 0; h < block.heads.count; ++h) {
          for (std::int64_t i = 0; i < block.rows.count; ++i) {
            any |= !touched.emplace(block.heads.begin + h, block.rows.begin.value() + i).second;
          }
        }
        EXPECT_EQ(block.merge, any);
      }
    }
  }
}

TEST(Plan, EveryVisiblePairIsComputedOnceUnderEveryLayoutScheduleAndMask) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
        for (int mask = 0; mask < 6; ++mask) {
          AttentionProblem problem = causal_problem(37, 4, 2);
          Mask& m = problem.mask;
          m.set_causal(mask != 0 && mask != 4);
          if (mask == 2) m.set_window(5, -1);
          if (mask == 3) m.set_offset(-9);
          if (mask == 4) m.set_window(4, 3);
          if (mask == 5) {
            const std::vector<std::int32_t> cu{0, 1, 13, 13, 30, 37};
            const auto ids = segments_from_cu_seqlens(cu, 37);
            m.set_segments(1, ids, ids);
          }
          for (const bool few : {true, false}) {
            SCOPED_TRACE(testing::Message()
                         << ranks << " ranks, " << name_of(layout) << ", " << name_of(schedule)
                         << ", mask " << to_string(m) << (few ? ", few heads at a time" : ""));
            const ShardedOperands operands = sequence_operands(problem, ranks, layout);
            PlanOptions options;
            options.gather_bytes = few ? 1 : std::int64_t{1} << 30;
            options.merge_bytes = few ? 1 : 0;
            options.straight_blocks = few;
            const Plan plan = make_plan(problem, operands, schedule, options);
            expect_valid(plan, operands);
            expect_merge_flags(plan);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Plan, RingsByHeadsKeepPartialResultsSmall) {
  const AttentionProblem problem = causal_problem(4096, 8, 4);
  PlanOptions options;
  // Three partial results in bfloat16 beside the output may take what the output takes in float32.
  options.merge_bytes = 1;
  const Plan plan = sequence_plan(problem, 4, LayoutKind::zigzag, Schedule::ring, options);
  for (const RankPlan& rank : plan.ranks) {
    const double values = static_cast<double>(rank.local.query_length * problem.shape.value_dim);
    std::int64_t most = 0;
    for (const Step& step : rank.steps) {
      for (const Block& block : step.blocks) most = std::max(most, block.heads.count);
    }
    EXPECT_LE(3 * values * static_cast<double>(most) * 2, values * 8 * 4);
    EXPECT_EQ(rank.steps.size(), 8U);
  }
}

TEST(Plan, RandomProblemsAreComputedCompletely) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (int index = 0; index < 60; ++index) {
      const verification::RandomProblem drawn = verification::draw_problem(7, index, ranks);
      SCOPED_TRACE(drawn.command + ": " + to_string(drawn.problem.shape) + ", mask " +
                   to_string(drawn.problem.mask));
      const ShardedOperands operands = shard_operands(drawn.problem, drawn.mesh, drawn.layout);
      const PlanOptions& options = drawn.plan;
      const Schedule schedule =
          choose_schedule(drawn.problem, operands, drawn.schedule, options, CostModel::cpu_core())
              .schedule;
      const Plan plan = make_plan(drawn.problem, operands, schedule, options);
      expect_valid(plan, operands);
      expect_merge_flags(plan);
      const RankPlan alone = make_rank_plan(drawn.problem, operands, schedule, options, ranks - 1);
      EXPECT_EQ(alone.work(), plan.ranks.back().work());
      EXPECT_EQ(alone.bytes_sent(), plan.ranks.back().bytes_sent());
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Plan, ZigzagAndStripedBalanceCausalWorkAndContiguousDoesNot) {
  const AttentionProblem problem = causal_problem(1 << 20);
  EXPECT_LT(sequence_plan(problem, 8, LayoutKind::zigzag, Schedule::ring).imbalance(), 1e-9);
  EXPECT_LT(sequence_plan(problem, 8, LayoutKind::striped, Schedule::ring).imbalance(), 1e-3);
  // The last of P contiguous chunks does (2P − 1)/P times the mean.
  EXPECT_NEAR(sequence_plan(problem, 8, LayoutKind::contiguous, Schedule::ring).imbalance(),
              7.0 / 8, 1e-3);
}

TEST(Plan, WorkOfAllRanksIsTheWorkOfTheProblem) {
  const AttentionProblem problem = causal_problem(1000, 8, 2);
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    const Plan plan = sequence_plan(problem, 7, layout, Schedule::ring);
    double work = 0;
    for (const RankPlan& rank : plan.ranks) work += rank.work();
    EXPECT_EQ(work, 8.0 * 1000 * 1001 / 2);
  }
}

TEST(Plan, CausalContiguousRingSendsNothingToEarlierRanks) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::contiguous, Schedule::ring);
  const std::int64_t block = 16 * 2 * (64 + 64) * 2;  // tokens · kv heads · (D + Dv) · bytes
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].bytes_received(), rank * block);
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].steps.size(), rank + 1U);
  }
}

TEST(Plan, ZigzagCausalRanksGetOnlyTheFirstChunkOfEarlierOnes) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  const std::int64_t chunk = 8 * 2 * (64 + 64) * 2;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan.ranks[static_cast<std::size_t>(rank)].bytes_received(),
              (rank + 2 * (3 - rank)) * chunk);
    for (const Step& step : plan.ranks[static_cast<std::size_t>(rank)].steps) {
      EXPECT_LE(step.blocks.size(), 1U);
      if (&step == &plan.ranks[static_cast<std::size_t>(rank)].steps.front()) continue;
      for (const Block& block : step.blocks) EXPECT_TRUE(block.full);
    }
  }
}

TEST(Plan, WindowBoundsWhatTravels) {
  AttentionProblem problem = causal_problem(1 << 16);
  const Plan whole = sequence_plan(problem, 4, LayoutKind::contiguous, Schedule::ring);
  problem.mask.set_window(4095, 0);
  const Plan windowed = sequence_plan(problem, 4, LayoutKind::contiguous, Schedule::ring);
  const std::int64_t slot = 2 * (64 + 64) * 2;
  EXPECT_EQ(windowed.ranks[0].bytes_received(), 0);
  for (std::size_t rank = 1; rank < 4; ++rank) {
    EXPECT_EQ(windowed.ranks[rank].bytes_received(), 4095 * slot);
    EXPECT_LT(windowed.ranks[rank].work(), whole.ranks[rank].work());
  }
}

TEST(Plan, RingNeverHoldsMoreThanTwoReceiveBuffersOfTheLocalSize) {
  for (const LayoutKind layout :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
    AttentionProblem problem = causal_problem(1003);
    problem.mask = Mask();
    const Plan plan = sequence_plan(problem, 5, layout, Schedule::ring);
    for (const RankPlan& rank : plan.ranks) {
      int receive = 0;
      for (const KvBuffer& buffer : rank.buffers) {
        if (buffer.kind != BufferKind::receive) continue;
        ++receive;
        EXPECT_LE(buffer.slots, 201 + 1);
      }
      EXPECT_EQ(receive, 2);
    }
  }
}

TEST(Plan, AllgatherByHeadGroupsBoundsMemory) {
  const AttentionProblem problem = causal_problem(1024, 16, 8);
  PlanOptions options;
  const std::int64_t per_head = 1024 * (64 + 64) * 2;
  options.gather_bytes = 2 * per_head;
  const Plan plan = sequence_plan(problem, 4, LayoutKind::zigzag, Schedule::allgather, options);
  const std::int64_t local = 256 * 8 * (64 + 64) * 2;
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(rank.steps.size(), 5U);  // own columns, then four groups of two heads
    EXPECT_LE(rank.buffer_bytes(problem.dtype), local + 2 * options.gather_bytes);
  }
}

// More pairs of segment runs than the mask counts one by one.
TEST(Plan, ABoundedCountNeverPassesForFullVisibility) {
  AttentionProblem problem = causal_problem(1024, 1, 1);
  std::vector<std::int32_t> ids(1024);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 2);
  for (const bool causal : {false, true}) {
    problem.mask = Mask();
    problem.mask.set_causal(causal);
    problem.mask.set_segments(1, ids, ids);
    for (const int ranks : {1, 2, 4}) {
      for (const RankPlan& rank :
           sequence_plan(problem, ranks, LayoutKind::contiguous, Schedule::ring).ranks) {
        for (const Step& step : rank.steps) {
          for (const Block& block : step.blocks) EXPECT_FALSE(block.full);
        }
      }
    }
  }
}

TEST(Plan, ReplicatedQueryAgainstShardedKeysIsComplete) {
  AttentionProblem problem = causal_problem(40, 4, 2);
  problem.shape.query_length = 1;
  problem.mask.set_offset(39);
  const ShardedOperands operands =
      shard_operands(problem, MeshShape({{"sp", 4}}),
                     {PartitionSpec(), PartitionSpec::parse("-,sp"), LayoutKind::contiguous, 1});
  expect_valid(make_plan(problem, operands, Schedule::ring, {}), operands);
}

TEST(Plan, JsonCarriesEveryRankAndStep) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  const auto json = nlohmann::json::parse(to_json(plan));
  EXPECT_EQ(json.at("version"), 1);
  EXPECT_EQ(json.at("schedule"), "ring");
  EXPECT_EQ(json.at("layout"), "zigzag");
  ASSERT_EQ(json.at("ranks").size(), 4U);
  for (std::size_t r = 0; r < 4; ++r) {
    const auto& rank = json.at("ranks")[r];
    ASSERT_EQ(rank.at("steps").size(), plan.ranks[r].steps.size());
    EXPECT_EQ(rank.at("bytes_received"), plan.ranks[r].bytes_received());
    EXPECT_EQ(rank.at("steps")[0].at("blocks").size(), plan.ranks[r].steps[0].blocks.size());
  }
}

TEST(Plan, TextShowsTheStepsOfTheRanksAskedFor) {
  const Plan plan = sequence_plan(causal_problem(64), 4, LayoutKind::zigzag, Schedule::ring);
  EXPECT_EQ(to_text(plan).find("step 0"), std::string::npos);
  const std::string text = to_text(plan, 2);
  EXPECT_NE(text.find("rank 1 (group rank 1)"), std::string::npos);
  EXPECT_EQ(text.find("rank 2 (group rank 2)"), std::string::npos);
  EXPECT_NE(text.find("compute rows 0:8+56:64 x columns 0:8+56:64"), std::string::npos);
}

TEST(Planner, AutoTakesLocalWhenNothingIsShardedAndSaysWhy) {
  const AttentionProblem problem = causal_problem(64);
  const ScheduleChoice choice =
      choose_schedule(problem, sequence_operands(problem, 1, LayoutKind::contiguous), "auto", {},
                      CostModel::cpu_core());
  EXPECT_EQ(choice.schedule, Schedule::local);
  ASSERT_EQ(choice.passed_over.size(), 2U);
  EXPECT_NE(choice.passed_over[0].second.find("not sharded"), std::string::npos);
}

TEST(Planner, AutoTakesTheScheduleThatThePredictionPrefers) {
  const AttentionProblem problem = causal_problem(4096);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  for (const double latency : {1e-9, 1.0}) {
    CostModel model = CostModel::cpu_core();
    model.transports.at("mpi") = CostCurve::transfer(latency, 3e9);
    const double ring = predicted_seconds(make_plan(problem, operands, Schedule::ring, {}), model);
    const double allgather =
        predicted_seconds(make_plan(problem, operands, Schedule::allgather, {}), model);
    const ScheduleChoice choice = choose_schedule(problem, operands, "auto", {}, model);
    EXPECT_EQ(choice.schedule, ring <= 1.01 * allgather ? Schedule::ring : Schedule::allgather);
  }
}

// Four GPUs that are linked alike: few key/value heads hide a gathering under a rank's own block,
// many do not. As measured, see benchmarks/NOTES.md.
TEST(Planner, AutoForGpusFollowsTheMeasurements) {
  const PlanOptions options = PlanOptions::for_place(Place::cuda(0));
  for (const auto& [heads, kv_heads, expected] :
       {std::tuple{64, 8, Schedule::allgather}, {32, 32, Schedule::ring}}) {
    AttentionProblem problem = causal_problem(8192, heads, kv_heads);
    problem.shape.head_dim = problem.shape.value_dim = 128;
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
    EXPECT_EQ(
        choose_schedule(problem, operands, "auto", options, CostModel::hopper_nvlink()).schedule,
        expected)
        << heads << "/" << kv_heads;
  }
}

TEST(Planner, LocalWithAShardedSequenceIsRefusedWithTheReason) {
  const AttentionProblem problem = causal_problem(64);
  try {
    (void)choose_schedule(problem, sequence_operands(problem, 2, LayoutKind::contiguous), "local",
                          {}, CostModel::cpu_core());
    FAIL() << "no error";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("sharded along sp"), std::string::npos);
  }
}

TEST(Planner, SchedulesOfLaterVersionsAndUnknownOnesAreToldApart) {
  EXPECT_EQ(parse_schedule("ring"), Schedule::ring);
  EXPECT_THROW((void)parse_schedule("ulysses"), NotAvailableError);
  EXPECT_THROW((void)parse_schedule("rign"), ArgumentError);
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
