#include <algorithm>
#include <cmath>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/attention/wrapped_native.hpp"
#include "tests/ring/sharded_attention_fixture.hpp"
#include "tests/support/host_context.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;
using verification::CaseShards;

class ShardedAttentionTest : public ShardedAttentionFixture {
 protected:
  ShardedAttentionTest() {
    problem_.shape = {2, 61, 83, 4, 2, 16, 8};
    problem_.mask.set_causal(true);
    problem_.mask.set_offset(22);
    layout_.sequence = LayoutKind::zigzag;
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
};

TEST_F(ShardedAttentionTest, RunsAgainAndAgain) {
  ShardedAttention attention = this->attention();
  (void)computed(attention, 2);
  for (int i = 0; i < 3; ++i) expect_same_bits(computed(attention), computed());
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
  EXPECT_TRUE(same_bits(before.query, after.query));
  EXPECT_TRUE(same_bits(before.key, after.key));
  EXPECT_TRUE(same_bits(before.value, after.value));
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
  expect_same_bits(silent, computed(attention));
  const std::size_t blocks = attention.rank_plan().all<Block>().size();
  const auto kernels = std::count_if(
      collector.spans().begin(), collector.spans().end(),
      [](const TraceSpan& span) { return span.label.category == TraceCategory::kernel; });
  EXPECT_EQ(static_cast<std::size_t>(kernels), blocks);
  EXPECT_GT(summarize(collector.spans()).call, 0);
}

// On one rank alone: nothing is sent. A later call computes everything again.
TEST_F(ShardedAttentionTest, KernelsAloneAreThoseOfTheBlocks) {
  TraceCollector collector;
  Tracer tracer;
  tracer.add_sink(collector);
  options_.runner.tracer = &tracer;
  for (const char* schedule : {"ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    SCOPED_TRACE(schedule);
    options_.schedule = schedule;
    ShardedAttention attention = this->attention();
    const CaseShards before = computed(attention);
    collector.clear();
    for (int run = 0; mesh_.rank() == 0 && run < 2; ++run) {
      attention.run_kernels(shards().local_tensors());
    }
    const auto& spans = collector.spans();
    EXPECT_EQ(spans.size(), mesh_.rank() == 0 ? 2 * attention.rank_plan().all<Block>().size() : 0);
    EXPECT_TRUE(std::ranges::all_of(
        spans, [](const TraceSpan& span) { return span.label.category == TraceCategory::kernel; }));
    expect_same_bits(before, computed(attention));
  }
}

TEST_F(ShardedAttentionTest, HeadMajorTensorsGiveTheSame) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    problem_.dtype = dtype;
    for (const char* schedule : {"ring", "allgather", "ulysses", "pass_q"}) {
      options_.schedule = schedule;
      const CaseShards empty = shards();
      const HeadMajor other(empty, device_.memory());
      attention().run(other.local_tensors());
      copy(HeadMajor::bthd(other.tensors[3]), empty.output.view());
      expect_same_bits(computed(), empty);
    }
  }
}

// Which only vanilla computes.
TEST_F(ShardedAttentionTest, Float64IsAccurateUnderEverySchedule) {
  Context context(test::session().world(), test::on_host());
  verification::ShardedCase one;
  one.problem = problem_;
  one.problem.dtype = DType::float64;
  one.problem.sinks = Sinks({1}, {0.5F});
  one.layout = layout_;
  for (const char* schedule : {"ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    one.schedule = schedule;
    EXPECT_EQ(verify_sharded(one, context).failure(), "") << schedule;
  }
}

// Under every schedule, on any number of ranks, with results that are folded on the way or not,
// with sinks, and with rows that see nothing.
TEST_F(ShardedAttentionTest, UnnormalisedOutputsAreRight) {
  Context context(test::session().world(), test::on_host());
  verification::ShardedCase one;
  one.problem = problem_;
  one.problem.normalize_output = false;
  one.problem.mask.set_offset(-5);  // the first five rows see nothing
  one.problem.mask.set_kv_lengths({83, 30});
  one.problem.dropout.emplace(0.2, 3);
  one.layout = layout_;
  const auto expect_right = [&] {
    EXPECT_EQ(verify_sharded(one, context).failure(), "")
        << one.schedule << (one.problem.sinks ? ", sinks, " : ", ") << one.implementation << ", "
        << annulus::name_of(one.problem.dtype);
  };
  for (const char* schedule :
       {"local", "ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"}) {
    one.schedule = schedule;
    one.layout.kv = PartitionSpec::parse(std::string(schedule) == "local" ? "-,-" : "-,sp");
    for (const bool sinks : {false, true}) {
      one.problem.sinks.reset();
      if (sinks) one.problem.sinks = Sinks({4, 2}, {0, 1, -2, 9, 3, 3, -1, -1});
      for (const std::int64_t result_bytes : {std::int64_t{0}, std::int64_t{1} << 20}) {
        one.plan.emplace().result_bytes = result_bytes;
        for (const DType lse_dtype : {DType::float32, DType::float64}) {
          one.plan->lse_dtype = lse_dtype;
          for (const char* implementation : {"native", "vanilla"}) {
            one.implementation = implementation;
            expect_right();
          }
        }
      }
      one.plan.reset();
      for (const DType dtype : {DType::float16, DType::bfloat16}) {
        one.problem.dtype = dtype;
        expect_right();
      }
      one.problem.dtype = DType::float32;
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

// Values of what all ranks have, beside the fields of Face.OneRanksAttentionOptionsOtherwise.
TEST_F(ShardedAttentionTest, RanksThatWantDifferentThingsAllHearOfIt) {
  if (alone()) GTEST_SKIP() << "needs 2 ranks";
  const auto expect_heard = [&](auto& field, const auto& other) {
    const auto before = field;
    if (mesh_.rank() == 1) field = other;
    EXPECT_THROW((void)attention(), ArgumentError);
    field = before;
  };
  expect_heard(options_.runner.replay, false);
  problem_.sinks = Sinks({1}, {1});
  expect_heard(problem_.sinks, Sinks({1}, {2}));
  problem_.dropout.emplace(0.1, 1);
  expect_heard(problem_.dropout, Dropout(0.1, 2));
  expect_heard(problem_.dropout, Dropout(0.1001, 1));
  const AttentionShape& s = problem_.shape;
  for (const auto scores : {&AttentionProblem::bias, &AttentionProblem::dense_mask}) {
    problem_.*scores = Extents{1, 1, 1, s.kv_length};
    expect_heard(problem_.*scores, Extents{1, s.heads, 1, s.kv_length});
  }
  EXPECT_NO_THROW(attention());
}

// CPUs with and without AMX, ranks with more and with fewer threads: all plan by the slowest.
TEST_F(ShardedAttentionTest, RanksOfUnlikeCpusSharePrices) {
  problem_.shape.query_length = 521;  // blocks of few rows would only wait for memory
  const double rate = registry_.get("native").assumed_rate(class_of(problem_), Place::host());
  // One of the two is faster on the first rank, the other one on all other ranks.
  test::add_native(registry_, "first", mesh_.rank() == 0 ? 8 : 2);
  test::add_native(registry_, "second", mesh_.rank() == 0 ? 1 : 4);
  options_.schedule = "auto";
  options_.runner.threads = mesh_.rank() == 0 ? 3 : 2;
  const double threads = mesh_.size() == 1 ? 3 : 2;
  ShardedAttention planned = attention();
  const Prices& prices = planned.plan_input().prices;
  EXPECT_EQ(prices.kernel("first").rate.clamped(1), rate * (mesh_.size() == 1 ? 24 : 4));
  EXPECT_EQ(prices.kernel("second").rate.clamped(1), rate * 3);
  EXPECT_EQ(prices.kernel("native").rate.clamped(1), rate * threads);
  EXPECT_EQ(planned.implementations(), "first");
  const CaseShards alike = computed(planned);
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
