#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/attention/wrapped_native.hpp"
#include "tests/support/host_context.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;
using verification::CaseShards;

class ShardedAttentionTest : public ::testing::Test {
 protected:
  ShardedAttentionTest()
      : mesh_(MeshShape({{"sp", test::session().size()}}), test::session().world(),
              test::kWatchdog) {
    problem_.shape = {2, 61, 83, 4, 2, 16, 8};
    problem_.mask.set_causal(true);
    problem_.mask.set_offset(22);
    layout_.query = layout_.kv = PartitionSpec::parse("-,sp");
    layout_.sequence = LayoutKind::zigzag;
    options_.schedule = "ring";
  }

  [[nodiscard]] ShardedOperands operands() const {
    return shard_operands(problem_, mesh_.shape(), layout_);
  }
  [[nodiscard]] CaseShards shards(std::uint64_t seed = 1) {
    return {operands(), problem_.dtype,           seed, mesh_.rank(), device_.memory(), 1,
            {},         problem_.normalize_output};
  }
  [[nodiscard]] ShardedAttention attention() {
    return {problem_, operands(), mesh_, registry_, device_, options_};
  }
  [[nodiscard]] CaseShards computed(std::uint64_t seed = 1) {
    CaseShards result = shards(seed);
    attention().run(result.local_tensors());
    return result;
  }

  static void expect_same_bits(const CaseShards& a, const CaseShards& b) {
    ASSERT_EQ(a.output.bytes(), b.output.bytes());
    EXPECT_EQ(std::memcmp(a.output.view().data(), b.output.view().data(), a.output.bytes()), 0);
    EXPECT_EQ(std::memcmp(a.lse.view().data(), b.lse.view().data(), a.lse.bytes()), 0);
  }
  // Another order of merging may change a few roundings.
  static void expect_close(const CaseShards& a, const CaseShards& b) {
    ASSERT_EQ(a.output.shape(), b.output.shape());
    const auto compare = [](const Tensor& x, const Tensor& y) {
      for (std::int64_t i = 0; i < x.shape().product(); ++i) {
        const float left = x.view().as<float>()[i];
        const float right = y.view().as<float>()[i];
        if (left == right) continue;  // −∞ too
        ASSERT_NEAR(left, right, 2e-6 * std::max(1.0F, std::abs(left))) << "element " << i;
      }
    };
    compare(a.output, b.output);
    compare(a.lse, b.lse);
  }

  Mesh mesh_;
  HostDevice device_;
  Registry registry_ = Registry::standard();
  AttentionProblem problem_;
  OperandLayout layout_;
  ShardedAttentionOptions options_;
};

TEST_F(ShardedAttentionTest, RunsAgainAndAgain) {
  ShardedAttention attention = this->attention();
  CaseShards other = shards(2);
  attention.run(other.local_tensors());
  for (int i = 0; i < 3; ++i) {
    CaseShards mine = shards(1);
    attention.run(mine.local_tensors());
    expect_same_bits(mine, computed(1));
  }
}

TEST_F(ShardedAttentionTest, RunningAllocatesNothingNew) {
  ShardedAttention attention = this->attention();
  const CaseShards mine = shards();
  attention.run(mine.local_tensors());
  const MemoryStatistics before = device_.memory().statistics();
  for (int i = 0; i < 3; ++i) attention.run(mine.local_tensors());
  const MemoryStatistics after = device_.memory().statistics();
  EXPECT_EQ(after.system_calls, before.system_calls);
  EXPECT_EQ(after.in_use, before.in_use);
}

TEST_F(ShardedAttentionTest, LeavesItsInputsAlone) {
  const CaseShards before = shards();
  const CaseShards after = computed();
  for (const auto& [a, b] :
       {std::pair(&before.query, &after.query), std::pair(&before.key, &after.key),
        std::pair(&before.value, &after.value)}) {
    EXPECT_EQ(std::memcmp(a->view().data(), b->view().data(), a->bytes()), 0);
  }
}

TEST_F(ShardedAttentionTest, SmallGathersAgreeWithLargeOnes) {
  options_.schedule = "allgather";
  const CaseShards large = computed();
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{4000}}) {
    options_.plan.emplace().gather_bytes = bytes;
    const CaseShards small = computed();
    expect_close(large, small);
    // And each repeats itself.
    expect_same_bits(small, computed());
  }
}

TEST_F(ShardedAttentionTest, ThreadsChangeNoBit) {
  const CaseShards one = computed();
  options_.runner.threads = 3;
  expect_same_bits(one, computed());
}

TEST_F(ShardedAttentionTest, TracingChangesNoBitAndSeesEveryBlock) {
  const CaseShards silent = computed();
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  options_.runner.tracer = &tracer;
  ShardedAttention attention = this->attention();
  const CaseShards traced = shards();
  attention.run(traced.local_tensors());
  expect_same_bits(silent, traced);
  const std::size_t blocks = attention.rank_plan().all<Block>().size();
  const auto kernels = std::count_if(
      collector.spans().begin(), collector.spans().end(),
      [](const TraceSpan& span) { return span.label.category == TraceCategory::kernel; });
  EXPECT_EQ(static_cast<std::size_t>(kernels), blocks);
  EXPECT_GT(summarize(collector.spans()).call, 0);
}

// [B,N,T,D] in memory, given through strides.
TEST_F(ShardedAttentionTest, HeadMajorTensorsGiveTheSame) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    problem_.dtype = dtype;
    for (const char* schedule : {"ring", "allgather", "ulysses", "pass_q"}) {
      options_.schedule = schedule;
      const CaseShards straight = computed();
      const auto head_major = [&](const Tensor& tensor) {
        const Extents& s = tensor.shape();
        Tensor result(tensor.dtype(), {s[0], s[2], s[1], s[3]}, device_.memory());
        copy(tensor.view().permute({0, 2, 1, 3}), result.view());
        return result;
      };
      CaseShards empty = shards();
      const Tensor query = head_major(empty.query);
      const Tensor key = head_major(empty.key);
      const Tensor value = head_major(empty.value);
      const Tensor output = head_major(empty.output);
      const auto bthd = [](const Tensor& tensor) { return tensor.view().permute({0, 2, 1, 3}); };
      attention().run(
          LocalTensors{bthd(query), bthd(key), bthd(value), bthd(output), empty.lse.view()});
      copy(bthd(output), empty.output.view());
      expect_same_bits(straight, empty);
    }
  }
}

// The oracle's output of the rank's rows, unnormalised.
OracleOutput truth_of(const AttentionProblem& problem, const ShardedOperands& operands, int rank,
                      const CaseShards& shards) {
  HostMemoryPool memory;
  const auto columns = [&](const NamedSharding& sharding, verification::Operand operand) {
    auto index = sharding.index(rank);
    index[1] = PositionRanges::all(sharding.global_shape()[1]);
    return verification::random_part(index, sharding.global_shape(), problem.dtype, 1, operand,
                                     memory);
  };
  const Tensor key = columns(operands.key, verification::Operand::key);
  const Tensor value = columns(operands.value, verification::Operand::value);
  return oracle_attention(problem, shards.query.view(), key.view(), value.view(),
                          operands.query.positions(rank, 1));
}

// Under every schedule, on any number of ranks, with results that are folded on the way or not,
// with sinks, and with rows that see nothing.
TEST_F(ShardedAttentionTest, UnnormalisedOutputsAreTheFormula) {
  problem_.normalize_output = false;
  problem_.mask.set_offset(-5);  // the first five rows see nothing
  problem_.mask.set_kv_lengths({83, 30});
  problem_.dropout.emplace(0.2, 3);
  for (const char* schedule :
       {"local", "ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    options_.schedule = schedule;
    layout_.kv = PartitionSpec::parse(std::string(schedule) == "local" ? "-,-" : "-,sp");
    for (const bool sinks : {false, true}) {
      problem_.sinks.reset();
      if (sinks) problem_.sinks = Sinks({4, 2}, {0, 1, -2, 9, 3, 3, -1, -1});
      for (const std::int64_t result_bytes : {std::int64_t{0}, std::int64_t{1} << 20}) {
        for (const DType lse_dtype : {DType::float32, DType::float64}) {
          for (const char* implementation : {"native", "vanilla"}) {
            SCOPED_TRACE(std::string(schedule) + (sinks ? ", sinks, " : ", ") + implementation);
            options_.implementation = implementation;
            options_.plan.emplace().result_bytes = result_bytes;
            options_.plan->lse_dtype = lse_dtype;
            const CaseShards mine = computed();
            const OracleOutput truth = truth_of(problem_, operands(), mesh_.rank(), mine);
            ASSERT_EQ(mine.lse.shape().rank(), 0);
            std::int64_t empty = 0;
            for (std::size_t i = 0; i < truth.lse.size(); ++i) {
              const float maximum = mine.maximum.view().as<float>()[i];
              const float sum = mine.sum.view().as<float>()[i];
              if (truth.sum[i] == 0) {
                ++empty;
                ASSERT_EQ(maximum, -std::numeric_limits<float>::infinity());
                ASSERT_EQ(sum, 0);
              } else {
                ASSERT_NEAR(maximum, truth.maximum[i], 1e-5);
                ASSERT_NEAR(sum, truth.sum[i], 1e-5 * truth.sum[i]);
              }
            }
            for (std::size_t i = 0; i < truth.output.size(); ++i) {
              const double want = truth.output[i];
              ASSERT_NEAR(mine.output.view().as<float>()[i], want, 1e-5 * (1 + std::abs(want)));
            }
            const double everywhere = mesh_.world().sum(std::array{static_cast<double>(empty)})[0];
            EXPECT_EQ(everywhere > 0, !sinks);
          }
        }
      }
    }
  }
}

TEST_F(ShardedAttentionTest, AnUnnormalisedRunOfHalfTypesPassesVerification) {
  Context context(test::session().world(), test::on_host());
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const char* schedule : {"ring", "allgather"}) {
      verification::ShardedCase one;
      one.problem = problem_;
      one.problem.dtype = dtype;
      one.problem.normalize_output = false;
      one.problem.sinks = Sinks({1}, {0.5F});
      one.layout = layout_;
      one.schedule = schedule;
      EXPECT_EQ(verify_sharded(one, context).failure(), "");
    }
  }
}

TEST_F(ShardedAttentionTest, LseMaximumAndSumAreThoseThatTheOutputHas) {
  const auto message = [&](bool normalize_output, const auto& spoil) {
    problem_.normalize_output = normalize_output;
    ShardedAttention attention = this->attention();
    const CaseShards mine = shards();
    LocalTensors tensors = mine.local_tensors();
    spoil(tensors);
    return test::message_of<UserError>([&] { attention.run(tensors); });
  };
  const Tensor other(DType::float32, operands().lse.local_shape(mesh_.rank()), device_.memory());
  EXPECT_THAT(message(false, [&](LocalTensors& t) { t.lse = other.view(); }),
              HasSubstr("the LSE is maximum + log(sum)"));
  EXPECT_THAT(message(false, [&](LocalTensors& t) { t.sum = {}; }), HasSubstr("sum: got shape"));
  EXPECT_THAT(message(false, [&](LocalTensors& t) { t.maximum = {}; }),
              HasSubstr("maximum: got shape"));
  EXPECT_THAT(message(true, [&](LocalTensors& t) { t.sum = other.view(); }),
              HasSubstr("none: the output is normalised"));
  EXPECT_THAT(message(true, [&](LocalTensors& t) { t.maximum = other.view(); }),
              HasSubstr("none: the output is normalised"));
}

TEST_F(ShardedAttentionTest, RanksThatWantDifferentThingsAllHearOfIt) {
  if (mesh_.size() == 1) GTEST_SKIP() << "needs 2 ranks";
  if (mesh_.rank() == 1) problem_.mask.set_offset(21);
  EXPECT_THROW(attention(), ArgumentError);
  problem_.mask.set_offset(22);
  const auto expect_heard = [&](auto& field, const auto& other) {
    const auto before = field;
    if (mesh_.rank() == 1) field = other;
    EXPECT_THROW((void)attention(), ArgumentError);
    field = before;
  };
  expect_heard(options_.schedule, "allgather");
  expect_heard(options_.transport, Transport::nccl);
  expect_heard(options_.runner.replay, false);
  expect_heard(problem_.scale, 3.0);
  expect_heard(problem_.soft_cap, 20.0);
  expect_heard(problem_.sinks, Sinks({1}, {1}));
  problem_.sinks = Sinks({1}, {1});
  expect_heard(problem_.sinks, Sinks({1}, {2}));
  problem_.sinks.reset();
  expect_heard(problem_.dropout, Dropout(0.1, 1));
  problem_.dropout.emplace(0.1, 1);
  expect_heard(problem_.dropout, Dropout(0.1, 2));
  expect_heard(problem_.dropout, Dropout(0.1001, 1));
  problem_.dropout.reset();
  expect_heard(problem_.normalize_output, false);
  for (const auto scores : {&AttentionProblem::bias, &AttentionProblem::dense_mask}) {
    const AttentionShape& s = problem_.shape;
    expect_heard(problem_.*scores, Extents{1, 1, 1, s.kv_length});
    problem_.*scores = Extents{1, 1, 1, s.kv_length};
    expect_heard(problem_.*scores, Extents{1, s.heads, 1, s.kv_length});
    (problem_.*scores).reset();
  }
  expect_heard(layout_.kv, PartitionSpec::parse("-,-"));
  PlanOptions plan;
  plan.lse_dtype = DType::float32;
  expect_heard(options_.plan, plan);
  CostModel model = CostModel::for_place(Place::host());
  model.merge_bytes_per_second *= 2;
  expect_heard(options_.cost_model, model);
  Tracer tracer;
  expect_heard(options_.runner.tracer, &tracer);
  EXPECT_NO_THROW(attention());
}

// CPUs with and without AMX, ranks with more and with fewer threads: all plan by the slowest.
TEST_F(ShardedAttentionTest, RanksOfUnlikeCpusSharePrices) {
  const double rate = registry_.get("native").assumed_rate(class_of(problem_), Place::host());
  const auto add = [&](const char* name, double speed) {
    registry_.add(std::make_unique<test::WrappedNative>(
        name, [](std::unique_ptr<Kernel> native) { return native; }, speed));
  };
  // One of the two is faster on the first rank, the other one on all other ranks.
  add("first", mesh_.rank() == 0 ? 8 : 2);
  add("second", mesh_.rank() == 0 ? 1 : 4);
  options_.schedule = "auto";
  options_.runner.threads = mesh_.rank() == 0 ? 3 : 2;
  const double threads = mesh_.size() == 1 ? 3 : 2;
  ShardedAttention planned = attention();
  const Prices& prices = planned.plan_input().prices;
  EXPECT_EQ(prices.kernel("first").rate.clamped(1), rate * (mesh_.size() == 1 ? 24 : 4));
  EXPECT_EQ(prices.kernel("second").rate.clamped(1), rate * 3);
  EXPECT_EQ(prices.kernel("native").rate.clamped(1), rate * threads);
  EXPECT_EQ(planned.implementations(), "first");
  const CaseShards alike = shards();
  planned.run(alike.local_tensors());
  options_.implementation = "native";
  expect_same_bits(alike, computed());
}

TEST_F(ShardedAttentionTest, ModelsOfOtherDevicesAreRefused) {
  options_.cost_model = CostModel::hopper_nvlink();
  EXPECT_THAT(test::message_of<UserError>([&] { (void)attention(); }),
              HasSubstr("expected one of CPU ranks"));
}

TEST_F(ShardedAttentionTest, AllRanksThrowWhatOneWould) {
  options_.schedule = "unheard of";
  EXPECT_THROW(attention(), UserError);
  options_.schedule = "ring";
  options_.implementation = "sdpa";
  EXPECT_THROW(attention(), UserError);
  options_.implementation = "auto";
  options_.schedule = "local";
  if (mesh_.size() > 1) {
    EXPECT_THROW(attention(), UserError);
  } else {
    EXPECT_NO_THROW(attention());
  }
}

}  // namespace
}  // namespace annulus::ring
