// Plans of the backward pass, played with tokens in place of tensors.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

#include "tests/ring/plan_player.hpp"
#include "tests/ring/sequence_plan.hpp"

namespace annulus::ring {
namespace {

PlanInput backward_input(const AttentionProblem& problem, const ShardedOperands& operands,
                         const PlanOptions& options = {}, const BackwardRequest& request = {}) {
  static const Registry registry = Registry::standard();
  return make_plan_input(problem, operands, {&registry.get("native")}, Place::host(),
                         CostModel::cpu_core(), options, request);
}

AttentionProblem small_problem(std::int64_t length, std::int64_t heads, std::int64_t kv_heads) {
  AttentionProblem problem = causal_problem(length, heads, kv_heads, 2);
  problem.shape.batch = 2;
  return problem;
}

// Two batches of different documents.
Mask documents(std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t batch = 0; batch < 2; ++batch) {
    for (std::int64_t i = 0; i < length; ++i) {
      ids.push_back(static_cast<std::int32_t>(i < 5 + 9 * batch ? 0 : i + 3 < length ? 1 : -1));
    }
  }
  Mask mask;
  mask.set_causal(true);
  mask.set_segments(2, ids, ids);
  return mask;
}

// Tokens of the first documents come again in later ones, so that sums skip ranks.
Mask scattered_documents(std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < 2 * length; ++i) {
    const std::int64_t chunk = i % length / 5;
    ids.push_back(static_cast<std::int32_t>(chunk * (chunk + i / length) % 3));
  }
  Mask mask;
  mask.set_segments(2, ids, ids);
  return mask;
}

// Rows of two or four ranks, if the ranks along the sequence can stand in them.
void expect_plays(PlanInput input, Schedule schedule, unsigned seed) {
  const int ranks = input.operands.key.shards(1);
  const int inner = ranks == 8 && seed % 2 == 0 ? 4 : ranks % 2 == 0 ? 2 : ranks;
  if (schedule == Schedule::double_ring) input.options.inner_size = inner;
  if (schedule == Schedule::hybrid) input.options.ulysses_degree = inner;
  const Plan plan = make_plan(input, schedule);
  expect_valid(plan, input.operands, seed);
  EXPECT_GT(predicted_seconds(plan, input.prices), 0);
  EXPECT_NE(to_text(plan, 1).find("backward"), std::string::npos);
  EXPECT_NE(to_json(plan).find("\"pass\": \"backward\""), std::string::npos);
}

TEST(BackwardPlan, EveryGradientHoldsEveryVisiblePairOnce) {
  unsigned seed = 0;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const LayoutKind layout :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      for (const auto& [heads, kv_heads] : {std::pair{8, 2}, {4, 4}, {6, 3}}) {
        const AttentionProblem problem = small_problem(29, heads, kv_heads);
        const ShardedOperands operands = sequence_operands(problem, ranks, layout);
        for (const Schedule schedule : kSchedules) {
          SCOPED_TRACE(testing::Message()
                       << name_of(schedule) << " of " << ranks << " ranks, " << heads << "/"
                       << kv_heads << ", " << annulus::name_of(layout));
          expect_plays(backward_input(problem, operands), schedule, ++seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Where bits must not depend on the ranks, a rank has one block for its rows, and one for its
// columns, of each group of heads.
TEST(BackwardPlan, BlocksInGlobalOrderComputeOneSide) {
  AttentionProblem problem = causal_problem(512, 4, 2, 2);
  problem.reproducible = Reproducible::world;
  PlanInput input = backward_input(problem, sequence_operands(problem, 2, LayoutKind::contiguous));
  input.options.gather_bytes = 1;
  expect_plays(input, Schedule::allgather, 0);
  const Plan plan = make_plan(input, Schedule::allgather);
  for (const RankPlan& rank : plan.ranks) {
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    for (const BackwardBlock* block : rank.all<BackwardBlock>()) {
      ASSERT_NE(block->gradients.rows, block->gradients.columns);
      rows += block->gradients.rows ? 1 : 0;
      columns += block->gradients.columns ? 1 : 0;
      EXPECT_EQ(block->rows.count, block->gradients.rows ? 256 : 512);
      EXPECT_EQ(block->columns.count, block->gradients.rows ? 512 : 256);
      // Both sides need the logits and dO Vᵀ.
      EXPECT_EQ(rank.backward_flops(*block),
                2.0 * static_cast<double>(block->pairs * block->heads.count) *
                    (block->gradients.rows ? 6 : 8));
    }
    EXPECT_EQ(rows, 2);
    EXPECT_EQ(columns, 2);
  }
}

TEST(BackwardPlan, MasksThatHideHops) {
  constexpr std::int64_t kLength = 33;
  std::vector<Mask> masks(6);
  masks[1].set_window(3, 0);
  masks[2].set_window(0, 4);
  masks[3] = documents(kLength);
  masks[4].set_causal(true);
  masks[4].set_kv_lengths({17, 0});
  masks[4].set_query_lengths({kLength, 20});
  masks[5] = scattered_documents(kLength);
  unsigned seed = 100;
  for (const Mask& mask : masks) {
    AttentionProblem problem = small_problem(kLength, 4, 2);
    problem.mask = mask;
    for (const int ranks : {2, 3, 4, 8}) {
      for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::zigzag}) {
        const ShardedOperands operands = sequence_operands(problem, ranks, layout);
        for (const Schedule schedule : kSchedules) {
          for (const bool direct : {false, true}) {
            SCOPED_TRACE(testing::Message() << to_string(mask) << ", " << name_of(schedule)
                                            << " of " << ranks << " ranks, " << direct);
            PlanOptions options{.direct = direct};
            options.gather_bytes = 1;  // a head at a time
            options.prefetch_bytes = direct ? std::int64_t{1} << 30 : 0;
            expect_plays(backward_input(problem, operands, options, {direct, direct}), schedule,
                         ++seed);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Columns that no rank needs are not sent, and neither are their gradients.
TEST(BackwardPlan, EmptyHopsMoveNothing) {
  AttentionProblem problem = small_problem(64, 4, 4);
  problem.mask = {};
  problem.mask.set_causal(true);
  problem.mask.set_window(15, 0);  // the rank itself and its left neighbour
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  for (const bool direct : {false, true}) {
    const PlanOptions options{.direct = direct};
    const Plan plan = make_plan(backward_input(problem, operands, options), Schedule::ring);
    // 15 columns of K and V to the right neighbour, and their gradients in float32 back.
    const std::int64_t columns = 15 * 2 * 4 * (2 + 2);
    for (const int rank : {0, 1, 2, 3}) {
      const RankPlan& one = plan.ranks[static_cast<std::size_t>(rank)];
      EXPECT_EQ(one.bytes_sent(), (rank < 3 ? columns * 2 : 0) + (rank > 0 ? columns * 4 : 0));
    }
  }
}

// Bytes of gradients of keys and values that a rank sends to some ranks.
template <class To>
std::int64_t bytes_of_gradients(const RankPlan& rank, const To& to) {
  std::int64_t bytes = 0;
  for (const Exchange* exchange : rank.all<Exchange>()) {
    for (const Transfer& send : exchange->sends) {
      const bool gradients = rank.buffer(send.buffer).contents.front() == Content::grad_key;
      if (gradients && to(send.peer)) bytes += send.bytes;
    }
  }
  return bytes;
}

// In a double ring the sum over a row crosses to the next row, whether or not columns go straight
// to their readers.
TEST(BackwardPlan, SumsOfARowCrossOnce) {
  AttentionProblem problem = small_problem(64, 4, 4);
  problem.mask = {};
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::contiguous);
  for (const bool direct : {false, true}) {
    const PlanOptions options{.direct = direct, .inner_size = 4};
    const Plan plan = make_plan(backward_input(problem, operands, options), Schedule::double_ring);
    std::int64_t crossing = 0;
    for (const RankPlan& rank : plan.ranks) {
      crossing += bytes_of_gradients(rank, [&](int peer) { return peer / 4 != rank.rank / 4; });
    }
    // Gradients of 64 columns, in float32, to the other row and back.
    EXPECT_EQ(crossing, 2 * (64 * 2 * 4 * (2 + 2)) * 4);
  }
}

// Keys and values come first in every step, so that gradients do not delay them.
TEST(BackwardPlan, KeysAndValuesComeBeforeGradients) {
  const AttentionProblem problem = small_problem(64, 4, 4);
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
    const Plan plan = make_plan(backward_input(problem, operands), schedule);
    for (const RankPlan& rank : plan.ranks) {
      int step = -1;
      bool gradients = false;
      for (const Task& task : rank.tasks) {
        const auto* exchange = std::get_if<Exchange>(&task.work);
        if (exchange == nullptr || exchange->sends.empty()) continue;
        const Content content = rank.buffer(exchange->sends.front().buffer).contents.front();
        if (task.step != step) gradients = false;
        step = task.step;
        EXPECT_FALSE(content == Content::key && gradients) << "step " << step;
        gradients = gradients || content == Content::grad_key;
      }
    }
  }
}

struct Sharded {
  std::string mesh, query, kv;
  std::size_t groups = 0;  // along which gradients of queries, keys and values move
};

std::vector<Sharded> replicated() {
  return {{"sp=4,x=2", "-,sp+x", "-,sp", 2},  // keys replicated along x
          {"sp=8", "-,-", "-,sp", 1},         // rows replicated
          {"sp=8", "-,sp", "-,-", 2},         // keys replicated
          {"dp=2,sp=2,tp=2", "dp,sp,tp", "dp,sp,tp", 1},
          {"sp=2,tp=4", "-,sp,tp", "-,sp,tp", 2},  // two ranks share a key/value head
          {"sp=2,x=4", "-,sp", "-,sp", 1}};        // all replicated along x: nothing to add
}

ShardedOperands operands_on(const AttentionProblem& problem, const Sharded& one) {
  return sharded_by(problem, MeshShape::parse(one.mesh, 8), one.query, one.kv, LayoutKind::zigzag);
}

// Ranks that hold the same part of an operand add its gradients up, along groups of their own.
TEST(BackwardPlan, GradientsOfReplicatedOperandsAreAddedUp) {
  std::vector<Sharded> cases = replicated();
  cases.push_back({"sp=4,x=2", "-,x", "-,sp", 2});  // each along the other's axis
  unsigned seed = 200;
  for (const Sharded& one : cases) {
    const AttentionProblem problem = small_problem(29, 4, 2);
    const ShardedOperands operands = operands_on(problem, one);
    for (const Schedule schedule : {Schedule::ring, Schedule::allgather}) {
      for (const bool adds : {false, true}) {
        SCOPED_TRACE(testing::Message() << one.mesh << " " << one.query << " " << one.kv << ", "
                                        << name_of(schedule) << (adds ? ", added" : ""));
        const PlanInput input = backward_input(problem, operands, {}, {false, adds});
        expect_plays(input, schedule, ++seed);
        if (HasFatalFailure()) return;
        for (const RankPlan& rank : make_plan(input, schedule).ranks) {
          EXPECT_EQ(rank.groups.size(), one.groups);
        }
      }
    }
  }
}

// Ulysses, where ranks also share key/value heads: with each other, and along another axis.
TEST(BackwardPlan, UlyssesAddsUpSharedHeads) {
  unsigned seed = 300;
  for (const std::string mesh : {"sp=8,tp=1", "sp=4,tp=2", "sp=2,tp=4"}) {
    const AttentionProblem problem = small_problem(29, 8, 2);
    const ShardedOperands operands = operands_on(problem, {mesh, "-,sp,tp", "-,sp,tp"});
    for (const bool adds : {false, true}) {
      SCOPED_TRACE(mesh);
      for (const Schedule schedule : {Schedule::ulysses, Schedule::hybrid}) {
        expect_plays(backward_input(problem, operands, {}, {true, adds}), schedule, ++seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Gradients of sinks are sums over all ranks that have rows of their heads.
TEST(BackwardPlan, GradientsOfSinksHoldEveryRowOnce) {
  std::vector<Sharded> cases = replicated();
  cases.push_back({"sp=8", "-,sp", "-,sp"});
  cases.push_back({"tp=4,x=2", "-,-,tp", "-,-,tp"});
  unsigned seed = 400;
  for (const Sharded& one : cases) {
    for (const std::int64_t length : {3, 29}) {  // also fewer rows than ranks
      AttentionProblem problem = small_problem(length, 4, 2);
      const ShardedOperands operands = operands_on(problem, one);
      for (const bool shared : {false, true}) {
        problem.sinks = shared ? Sinks({2}, {0, 1}) : Sinks::random(4, 3, 1);
        for (const bool adds : {false, true}) {
          SCOPED_TRACE(testing::Message() << one.mesh << " " << one.query << ", " << length
                                          << (shared ? ", shared" : "") << (adds ? ", added" : ""));
          expect_plays(backward_input(problem, operands, {}, {adds, adds, true}), Schedule::ring,
                       ++seed);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  const AttentionProblem problem = [] {
    AttentionProblem made = small_problem(29, 8, 2);
    made.sinks = Sinks::random(8, 1, 1);
    return made;
  }();
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  for (const Schedule schedule : kSchedules) {
    const PlanInput input = backward_input(problem, operands, {}, {false, false, true});
    expect_plays(input, schedule, ++seed);
    // The sum goes to one rank, and from there to all others: 4 bytes of 8 heads, 3 times.
    const Plan with = make_plan(input, schedule);
    const Plan without = make_plan(backward_input(problem, operands), schedule);
    std::int64_t more = 0;
    for (std::size_t r = 0; r < with.ranks.size(); ++r) {
      more += with.ranks[r].bytes_sent() - without.ranks[r].bytes_sent();
    }
    EXPECT_EQ(more, 2 * 3 * 8 * 4);
  }
}

// Rows of a bias go with the queries; over what it is broadcast, its gradient is a sum over ranks.
TEST(BackwardPlan, GradientsOfABiasHoldEveryPairOnce) {
  constexpr std::int64_t kLength = 19;
  unsigned seed = 500;
  for (int broadcast = 0; broadcast < 8; ++broadcast) {
    AttentionProblem problem = small_problem(kLength, 4, 2);
    problem.bias = Extents{(broadcast & 1) != 0 ? 1 : 2, (broadcast & 2) != 0 ? 1 : 4,
                           (broadcast & 4) != 0 ? 1 : kLength, kLength};
    for (const Sharded& one : replicated()) {
      const ShardedOperands operands = operands_on(problem, one);
      for (const Schedule schedule : kSchedules) {
        const bool of_heads = schedule == Schedule::ulysses || schedule == Schedule::hybrid;
        if (of_heads && one.query != one.kv) continue;  // which exchanges heads of both
        const bool adds = seed % 2 == 0;
        SCOPED_TRACE(testing::Message()
                     << one.mesh << " " << one.query << " " << one.kv << ", " << name_of(schedule)
                     << ", bias " << to_string(*problem.bias) << (adds ? ", added" : ""));
        BackwardRequest request{adds, adds, false, true};
        expect_plays(backward_input(problem, operands, {}, request), schedule, ++seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Where several ranks share no entry of a bias, nothing is sent for its gradient.
TEST(BackwardPlan, GradientsOfOwnRowsOfABiasStay) {
  AttentionProblem problem = small_problem(64, 4, 2);
  problem.bias = Extents{1, 4, 64, 64};
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
  for (const Schedule schedule : {Schedule::ring, Schedule::allgather, Schedule::double_ring}) {
    const PlanOptions options{.inner_size = 2};
    const Plan with = make_plan(
        backward_input(problem, operands, options, {false, false, false, true}), schedule);
    const Plan without = make_plan(backward_input(problem, operands, options), schedule);
    for (std::size_t r = 0; r < with.ranks.size(); ++r) {
      EXPECT_EQ(with.ranks[r].bytes_sent(), without.ranks[r].bytes_sent());
      EXPECT_GT(with.ranks[r].caller_buffer(Content::grad_bias), 0);
    }
    EXPECT_GT(predicted_seconds(with, backward_input(problem, operands).prices),
              predicted_seconds(without, backward_input(problem, operands).prices));
  }
}

// A reduction takes 32 parts.
TEST(BackwardPlan, MoreReplicasThanAReductionTakes) {
  AttentionProblem problem = small_problem(40, 1, 1);
  const ShardedOperands operands =
      sharded_by(problem, MeshShape({{"sp", 40}}), "-,sp", "-,-", LayoutKind::zigzag);
  expect_plays(backward_input(problem, operands), Schedule::ring, 1);
}

// Rows that go round are less to send where there are few query heads for each key/value head.
TEST(BackwardPlan, AutoPricesEverySchedule) {
  for (const std::int64_t kv_heads : {4, 1}) {
    const AttentionProblem problem = causal_problem(64, 4, kv_heads);  // D = 64
    const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::zigzag);
    const PlanInput input = backward_input(problem, operands);
    const ScheduleChoice choice = choose_schedule(input, "auto");
    EXPECT_GT(choice.seconds, 0);
    bool dismissed = false;
    for (const auto& other : choice.passed_over) {
      if (other.schedule != Schedule::pass_q) continue;
      dismissed =
          other.reason.find("more to send than keys and values and theirs") != std::string::npos;
    }
    EXPECT_EQ(dismissed, kv_heads == 1);
  }
}

// Queries and dO of 16 rows, their LSE and delta, to three ranks, and dQ in float32 back.
TEST(BackwardPlan, PassQSendsRowsAndTheirGradients) {
  AttentionProblem problem = small_problem(64, 4, 4);
  problem.mask = {};
  const ShardedOperands operands = sequence_operands(problem, 4, LayoutKind::contiguous);
  const Plan plan = make_plan(backward_input(problem, operands), Schedule::pass_q);
  const std::int64_t rows = 16 * 2 * 4;  // of all batches and heads
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(rank.bytes_sent(), 3 * rows * (2 * (2 + 2) + 4 + 4 + 4 * 2));
  }
  // Rows go to where they see columns only.
  problem.mask.set_causal(true);
  const Plan causal = make_plan(backward_input(problem, operands), Schedule::pass_q);
  for (const RankPlan& rank : causal.ranks) {
    EXPECT_EQ(rank.bytes_sent(),
              rows * (rank.rank * (2 * (2 + 2) + 4 + 4) + (3 - rank.rank) * 4 * 2));
  }
}

PlanOptions rounding() {
  return {.grad_wire = DType::bfloat16};
}

// Where gradients of keys and values go straight to their owners, they may go in half the bytes.
TEST(BackwardPlan, PartsOfGradientsAreRoundedOnceOnTheirWay) {
  unsigned seed = 600;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const std::int64_t kv_heads : {4, 1}) {
      const AttentionProblem problem = small_problem(29, 4, kv_heads);
      const ShardedOperands operands = sequence_operands(problem, ranks, LayoutKind::zigzag);
      for (const Schedule schedule : {Schedule::ring, Schedule::allgather, Schedule::ulysses}) {
        for (const bool adds : {false, true}) {
          SCOPED_TRACE(testing::Message() << name_of(schedule) << " of " << ranks << ", "
                                          << kv_heads << (adds ? ", added" : ""));
          const PlanInput input = backward_input(problem, operands, rounding(), {false, adds});
          expect_plays(input, schedule, ++seed);
          if (HasFatalFailure()) return;
          PlanInput wide = input;
          wide.options.grad_wire = DType::float32;
          wide.options.direct = true;
          // Complete gradients of whole heads have the problem's dtype anyway.
          const bool complete = schedule == Schedule::ulysses && !adds && kv_heads == 4;
          for (int rank = 0; rank < ranks; ++rank) {
            const RankPlan rounded = make_rank_plan(input, schedule, rank);
            const RankPlan whole = make_rank_plan(wide, schedule, rank);
            EXPECT_EQ(rounded.adds_rounded_gradients(), ranks > 1 && !complete);
            EXPECT_FALSE(whole.adds_rounded_gradients());
            const auto sent = [](const RankPlan& plan) {
              return bytes_of_gradients(plan, [](int /*peer*/) { return true; });
            };
            EXPECT_EQ(sent(rounded), complete ? sent(whole) : sent(whole) / 2);
          }
        }
      }
    }
  }
}

TEST(BackwardPlan, RoundingSumsOnTheirWayIsRefused) {
  AttentionProblem problem = small_problem(64, 8, 8);
  const ShardedOperands operands = sequence_operands(problem, 8, LayoutKind::zigzag);
  PlanInput input = backward_input(problem, operands, rounding());
  input.options.inner_size = 4;
  input.options.ulysses_degree = 2;
  const auto refused = [&](Schedule schedule) {
    EXPECT_THROW(static_cast<void>(make_rank_plan(input, schedule, 0)), UnsupportedError)
        << name_of(schedule);
    EXPECT_THROW(check_schedule(input, name_of(schedule)), UnsupportedError);
  };
  refused(Schedule::double_ring);
  refused(Schedule::hybrid);
  const ScheduleChoice choice = choose_schedule(input, "auto");
  EXPECT_TRUE(choice.schedule != Schedule::double_ring && choice.schedule != Schedule::hybrid);
  // One row is the ring, and all ranks that exchange heads are ulysses.
  input.options.inner_size = 8;
  input.options.ulysses_degree = 8;
  for (const Schedule schedule : {Schedule::double_ring, Schedule::hybrid}) {
    EXPECT_NO_THROW(check_schedule(input, name_of(schedule)));
  }
  // Which gradients travel depends on the number of ranks.
  problem.reproducible = Reproducible::world;
  refused(Schedule::ulysses);
  problem.reproducible.reset();
  // Gradients of float32 problems would lose what the dtype promises.
  problem.dtype = DType::float32;
  refused(Schedule::ring);
  EXPECT_THROW(static_cast<void>(choose_schedule(input, "auto")), UnsupportedError);
}

TEST(BackwardPlan, PartlyReplicatedRowsAreRefused) {
  const AttentionProblem problem = small_problem(32, 4, 4);
  const ShardedOperands operands = operands_on(problem, {"a=2,b=4", "-,a", "-,a+b"});
  EXPECT_THROW(
      static_cast<void>(make_rank_plan(backward_input(problem, operands), Schedule::ring, 0)),
      UnsupportedError);
}

}  // namespace
}  // namespace annulus::ring
