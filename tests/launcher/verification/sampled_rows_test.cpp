#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/verification/sampled_rows.hpp>

namespace annulus::verification {
namespace {

constexpr std::uint64_t kSeed = 3;

// A rank in the midst of a mesh, with more columns than are made at a time; early rows see few.
class SampledRows : public ::testing::Test {
 protected:
  SampledRows() {
    problem_.shape = {4, 64, 2 * kSampledColumns + 5, 8, 4, 8, 6};
    problem_.dtype = DType::float32;
    problem_.mask.set_causal(true);
    problem_.mask.set_offset(kSampledColumns - 20);
    layout_.query = layout_.kv = PartitionSpec::parse("dp,sp,tp");
    layout_.sequence = LayoutKind::zigzag;
  }

  [[nodiscard]] ring::ShardedOperands operands() const {
    return shard_operands(problem_, MeshShape({{"dp", 2}, {"tp", 2}, {"sp", 2}}), layout_);
  }

  // From whole columns.
  [[nodiscard]] OracleOutput truth_of(const CaseShards& shards) {
    const auto columns = [&](const NamedSharding& sharding, Operand operand) {
      auto index = sharding.index(kRank);
      index[1] = PositionRanges::all(sharding.global_shape()[1]);
      return random_part(index, sharding.global_shape(), problem_.dtype, kSeed, operand, memory_);
    };
    const Tensor key = columns(operands().key, Operand::key);
    const Tensor value = columns(operands().value, Operand::value);
    const NamedSharding query = operands().query;
    const auto first = [&](int dim) {
      return query.positions(kRank, dim).global(LocalPosition(0)).value();
    };
    return oracle_attention(problem_, shards.query.view(), key.view(), value.view(),
                            query.positions(kRank, 1), first(0), first(2), 0,
                            shards.scores(problem_.shape.kv_length));
  }

  // The shards with the right answer in them.
  [[nodiscard]] CaseShards computed() {
    CaseShards shards(operands(), problem_.dtype, kSeed, kRank, memory_, 1, {},
                      problem_.normalize_output);
    const OracleOutput truth = truth_of(shards);
    const auto round = [](double x) { return static_cast<float>(x); };
    std::transform(truth.output.begin(), truth.output.end(), shards.output.view().as<float>(),
                   round);
    if (problem_.normalize_output) {
      std::transform(truth.lse.begin(), truth.lse.end(), shards.lse.view().as<float>(), round);
    } else {
      std::transform(truth.maximum.begin(), truth.maximum.end(), shards.maximum.view().as<float>(),
                     round);
      std::transform(truth.sum.begin(), truth.sum.end(), shards.sum.view().as<float>(), round);
    }
    return shards;
  }

  [[nodiscard]] Deviation deviation(const CaseShards& shards, int threads = 3) const {
    return sampled_deviation(problem_, operands(), shards, kSeed, kRank, threads);
  }

  static constexpr int kRank = 5;  // dp 1, tp 0, sp 1
  HostMemoryPool memory_;
  AttentionProblem problem_;
  ring::OperandLayout layout_;
};

TEST_F(SampledRows, TheRightAnswerIsARoundingAway) {
  const Deviation found = deviation(computed());
  EXPECT_GT(found.reference, 0);
  EXPECT_LT(found.difference, 1e-14 * found.reference);
  EXPECT_LT(found.lse, 1e-6);
  EXPECT_GT(found.row_share, 0);
  EXPECT_LT(found.row_share, 0.3);
  EXPECT_LT(found.lse_share, 0.3);
}

// The bounds of rows whose columns were made piece by piece equal the bounds of the whole.
TEST_F(SampledRows, BoundsOfRowsAreThoseOfTheWhole) {
  problem_.sinks = Sinks::random(problem_.shape.heads, 2, 1);
  problem_.dropout.emplace(0.4, 9);
  const CaseShards shards = computed();
  auto& element = shards.output.view().at<float>({1, 31, 2, 5});  // sample 7
  element += 1e-3F;
  const Deviation whole =
      compare(problem_, truth_of(shards), shards.output.view(), shards.lse.view());
  EXPECT_GT(whole.row_share, 10);
  EXPECT_NEAR(deviation(shards).row_share / whole.row_share, 1, 1e-9);
}

TEST_F(SampledRows, Modifiers) {
  problem_.sinks = Sinks::random(problem_.shape.heads, 2, 1);
  problem_.dropout.emplace(0.4, 9);
  const AttentionShape& s = problem_.shape;
  problem_.bias = Extents{1, s.heads, s.query_length, s.kv_length};
  problem_.dense_mask = Extents{s.batch, 1, s.query_length, s.kv_length};
  for (const std::int64_t offset : {problem_.mask.offset(), std::int64_t{-64}}) {
    problem_.mask.set_offset(offset);  // the last rows that see nothing
    const Deviation found = deviation(computed());
    EXPECT_LE(found.difference, 1e-14 * found.reference);
    EXPECT_LT(found.lse, 1e-6);
  }
}

TEST_F(SampledRows, UnnormalisedOutputs) {
  problem_.normalize_output = false;
  for (const bool sinks : {false, true}) {
    if (sinks) problem_.sinks = Sinks::random(problem_.shape.heads, 2, 1);
    for (const std::int64_t offset : {problem_.mask.offset(), std::int64_t{-64}}) {
      problem_.mask.set_offset(offset);  // the last rows that see nothing
      const CaseShards shards = computed();
      EXPECT_LE(deviation(shards).difference, 1e-13 * deviation(shards).reference);
      EXPECT_LT(deviation(shards).lse, 2e-6);
      auto& maximum = shards.maximum.view().at<float>({0, 1, 0});
      maximum = std::isinf(maximum) ? 1 : maximum + 1;  // −∞ where the row sees nothing
      EXPECT_GT(deviation(shards).lse, 0.5);
    }
    problem_.mask.set_offset(kSampledColumns - 20);
  }
}

TEST_F(SampledRows, ThreadsChangeNothing) {
  const CaseShards shards = computed();
  const Deviation one = deviation(shards, 1);
  const Deviation many = deviation(shards, 4);
  EXPECT_EQ(one.difference, many.difference);
  EXPECT_EQ(one.reference, many.reference);
  EXPECT_EQ(one.lse, many.lse);
}

TEST_F(SampledRows, FirstAndLastRowAndEveryHeadOfTheSampleCount) {
  const CaseShards shards = computed();
  const double before = deviation(shards).difference;
  // Samples 0 and 7: batches 0 and 1, the two query heads of key/value heads 0 and 1.
  for (const std::int64_t head : {0, 1}) {
    for (const std::int64_t sample : {0, 1}) {
      auto& element = shards.output.view().at<float>({sample, sample * 31, sample * 2 + head, 5});
      const float right = element;
      element += 1;
      EXPECT_NEAR(deviation(shards).difference - before, 1, 1e-5);
      element = right;
    }
  }
  shards.lse.view().at<float>({0, 1, 0}) += 1;
  EXPECT_NEAR(deviation(shards).lse, 1, 1e-5);
}

TEST_F(SampledRows, RowsThatSeeNothing) {
  problem_.mask.set_offset(-64);
  const CaseShards shards = computed();
  EXPECT_EQ(deviation(shards).reference, 0);
  EXPECT_EQ(deviation(shards).difference, 0);
  EXPECT_EQ(deviation(shards).lse, 0);
  shards.output.view().at<float>({0, 0, 0, 0}) = 1;
  EXPECT_EQ(deviation(shards).difference, std::numeric_limits<double>::infinity());
}

TEST_F(SampledRows, NoColumnsAndNoRows) {
  problem_.shape.kv_length = 0;
  EXPECT_EQ(deviation(computed()).difference, 0);
  problem_.shape.query_length = 0;
  EXPECT_EQ(deviation(computed()).difference, 0);
}

}  // namespace
}  // namespace annulus::verification
