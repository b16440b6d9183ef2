#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>

#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/random_tensor.hpp"

namespace annulus::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

float element(const Tensor& tensor, std::initializer_list<std::int64_t> index) {
  return tensor.view().at<float>(index);
}

TEST(Oracle, EqualLogitsGiveTheMeanOfTheVisibleValues) {
  Random random(6);
  AttentionProblem problem = causal_problem_of({2, 5, 9, 4, 2, 3, 2}, DType::float32, 2);
  problem.mask.set_kv_lengths({9, 4});
  WholeAttention whole = random_attention(random, problem);
  whole.key.fill_zero();
  const OracleOutput got = whole.oracle();
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t t = 0; t < 5; ++t) {
      const std::int64_t count = std::min<std::int64_t>(t + 3, b == 0 ? 9 : 4);
      for (std::int64_t n = 0; n < 4; ++n) {
        const auto row = static_cast<std::size_t>((b * 5 + t) * 4 + n);
        for (std::int64_t d = 0; d < 2; ++d) {
          double mean = 0;
          for (std::int64_t j = 0; j < count; ++j) mean += element(whole.value, {b, j, n / 2, d});
          EXPECT_NEAR(got.output[row * 2 + static_cast<std::size_t>(d)],
                      mean / static_cast<double>(count), 1e-14);
        }
        EXPECT_NEAR(got.lse[static_cast<std::size_t>((b * 4 + n) * 5 + t)],
                    std::log(static_cast<double>(count)), 1e-14);
      }
    }
  }
}

TEST(Oracle, OneVisibleKeyGivesItsValueAndItsLogit) {
  Random random(7);
  const std::int64_t length = 6;
  AttentionProblem problem = problem_of({1, length, length, 2, 1, 3, 4});
  problem.mask.set_window(0, 0);  // the diagonal alone
  problem.scale = -1.5;
  WholeAttention whole = random_attention(random, problem);
  for (const bool capped : {false, true}) {
    if (capped) whole.problem.soft_cap = 0.7;
    const OracleOutput got = whole.oracle();
    for (std::int64_t t = 0; t < length; ++t) {
      for (std::int64_t n = 0; n < 2; ++n) {
        double logit = 0;
        for (std::int64_t d = 0; d < 3; ++d) {
          logit += -1.5 * element(whole.query, {0, t, n, d}) * element(whole.key, {0, t, 0, d});
        }
        if (capped) logit = 0.7 * std::tanh(logit / 0.7);
        EXPECT_NEAR(got.lse[static_cast<std::size_t>(n * length + t)], logit, 1e-14);
        for (std::int64_t d = 0; d < 4; ++d) {
          EXPECT_EQ(got.output[static_cast<std::size_t>((t * 2 + n) * 4 + d)],
                    element(whole.value, {0, t, 0, d}));
        }
      }
    }
  }
}

TEST(Oracle, TwoKeysShareByTheSigmoidOfTheirDifference) {
  const OracleOutput got =
      attention_of(problem_of({1, 1, 2, 1, 1, 1, 1}), {2}, {0.5F, 1.25F}, {1, 0}).oracle();
  EXPECT_NEAR(got.output[0], 1.0 / (1.0 + std::exp(1.5)), 1e-15);
  EXPECT_NEAR(got.lse[0], std::log(std::exp(1.0) + std::exp(2.5)), 1e-15);
}

// Sinks are keys whose value is 0.
TEST(Oracle, SinksTakeTheirShare) {
  AttentionProblem problem = causal_problem_of({1, 2, 2, 2, 1, 1, 1});
  problem.mask.set_query_lengths({1});
  problem.soft_cap = 1e6;  // neither cap nor scale changes a sink
  problem.scale = 2;
  problem.sinks = Sinks({4, 2}, {9, 9, 9, 9, 0, 1, -3, 4});
  const WholeAttention whole = attention_of(problem, {2, 3, 2, 3}, {0.5F, 1.25F}, {6, 7});
  const OracleOutput got = oracle_attention(problem, whole.query.view(), whole.key.view(),
                                            whole.value.view(), whole.rows(), 0, 2);
  for (const std::size_t head : {0, 1}) {
    const double logit = 2 * (head == 0 ? 2 : 3) * 0.5;
    const double sinks = head == 0 ? std::exp(0.0) + std::exp(1.0) : std::exp(-3.0) + std::exp(4.0);
    const double sum = std::exp(logit) + sinks;
    EXPECT_NEAR(got.output[head], 6 * std::exp(logit) / sum, 1e-10);
    EXPECT_NEAR(got.lse[2 * head], std::log(sum), 1e-10);
    // The second row is padding.
    EXPECT_EQ(got.output[2 + head], 0);
    EXPECT_NEAR(got.lse[2 * head + 1], std::log(sinks), 1e-12);
  }
}

// The denominator is the undropped one, and so is the LSE.
TEST(Oracle, DropoutRemovesProbabilitiesAndScalesTheRest) {
  Random random(9);
  WholeAttention whole = random_attention(random, problem_of({2, 3, 5, 2, 1, 3, 5}));
  std::vector<float> identity;
  for (int i = 0; i < 2 * 25; ++i) identity.push_back(i % 25 % 6 == 0 ? 1.0F : 0.0F);
  whole.value = tensor_of(DType::float32, {2, 5, 1, 5}, identity);
  const OracleOutput probabilities = whole.oracle();
  const Dropout& dropout = whole.problem.dropout.emplace(0.5, 21);
  const OracleOutput dropped = whole.oracle();
  EXPECT_EQ(dropped.lse, probabilities.lse);
  int kept = 0;
  for_each_of<4>({2, 3, 2, 5}, [&](auto b, auto t, auto n, auto j) {
    const auto i = static_cast<std::size_t>(((b * 3 + t) * 2 + n) * 5 + j);
    const bool drops = dropout.drops(b, n, GlobalPosition(t), GlobalPosition(j));
    EXPECT_DOUBLE_EQ(dropped.output[i], drops ? 0 : 2 * probabilities.output[i]);
    kept += drops ? 0 : 1;
  });
  EXPECT_GT(kept, 10);
  EXPECT_LT(kept, 50);
}

// Rows whose logits are all −∞ are 0/0; with a sink, such logits have no weight.
TEST(Oracle, SinksGiveRowsWithoutWeightADenominator) {
  constexpr auto kNothing = static_cast<float>(-kInfinity);
  WholeAttention whole = attention_of(problem_of({1, 1, 1, 1, 1, 1, 1}), {1}, {kNothing}, {6});
  whole.problem.sinks = Sinks({1}, {3});
  EXPECT_EQ(whole.oracle().output[0], 0);
  EXPECT_EQ(whole.oracle().lse[0], 3);
  whole.problem.sinks = Sinks({1}, {kNothing});
  EXPECT_TRUE(std::isnan(whole.oracle().output[0]));
  EXPECT_EQ(whole.oracle().lse[0], -kInfinity);
}

TEST(Oracle, RowsThatSeeNothingAreEmpty) {
  Random random(8);
  AttentionProblem problem = problem_of({1, 3, 4, 1, 1, 2, 2});
  problem.mask.set_segments(1, {-1, 0, 5}, {0, -1, 0, 1});
  const Tensor query = random_tensor(random, DType::float32, {1, 3, 1, 2});
  const Tensor key = random_tensor(random, DType::float32, {1, 4, 1, 2});
  const OracleOutput got =
      oracle_attention(problem, query.view(), key.view(), key.view(), PositionRanges::all(3));
  EXPECT_EQ(got.lse[0], -kInfinity);
  EXPECT_GT(got.lse[1], -kInfinity);
  EXPECT_EQ(got.lse[2], -kInfinity);
  for (const std::size_t i : {0U, 1U, 4U, 5U}) EXPECT_EQ(got.output[i], 0.0);

  const Tensor none = random_tensor(random, DType::float32, {1, 0, 1, 2});
  const OracleOutput empty =
      oracle_attention(problem, query.view(), none.view(), none.view(), PositionRanges::all(3));
  EXPECT_EQ(empty.output, std::vector<double>(6));
  EXPECT_EQ(empty.lse, std::vector<double>(3, -kInfinity));
}

// As docs/semantics.md defines it: in float64, with NaN where there is no number.
Result oracle_result(const WholeAttention& whole) {
  const OracleOutput truth = whole.oracle();
  Result result(whole.block());
  std::copy(truth.output.begin(), truth.output.end(), result.output.view().as<float>());
  std::copy(truth.lse.begin(), truth.lse.end(), result.lse.view().as<float>());
  return result;
}

TEST(Oracle, HiddenNansAndInfinitiesReachNoRow) {
  expect_non_finite_confined(DType::float32, oracle_result);
}

TEST(Oracle, RowsOfNoWeightAreNotEmpty) {
  expect_weightless_shown(oracle_result(weightless_attention()));
  expect_nan_before_weightless_shown(DType::float32, oracle_result);
}

// A value counts, however small its weight.
TEST(Oracle, NansOfTinyWeightShow) {
  const OracleOutput got =
      attention_of(problem_of({1, 1, 2, 1, 1, 1, 1}), {1}, {-1e4F, 1e4F}, {std::nanf(""), 1})
          .oracle();
  EXPECT_TRUE(std::isnan(got.output[0]));
  EXPECT_EQ(got.lse[0], 1e4);
}

TEST(Oracle, ShardsAreSlicesOfTheWhole) {
  // Rows, batches and heads of a shard mean the same as in the whole, through BHTD strides too.
  Random random(9);
  AttentionProblem problem = causal_problem_of({2, 8, 8, 4, 2, 3, 3});
  problem.mask.set_query_lengths({8, 5});
  const Tensor query = random_tensor(random, DType::float32, {2, 4, 8, 3});
  const Tensor key = random_tensor(random, DType::float32, {2, 2, 8, 3});
  const TensorView q = query.view().permute({0, 2, 1, 3});
  const TensorView k = key.view().permute({0, 2, 1, 3});
  const OracleOutput whole = oracle_attention(problem, q, k, k, PositionRanges::all(8));
  const PositionRanges rows({{GlobalPosition(3), 2, 4}});
  const Tensor part(DType::float32, {1, 2, 2, 3}, test_memory());
  copy(q.slice(0, 1, 1).slice(2, 2, 2).slice(1, 3, 1), part.view().slice(1, 0, 1));
  copy(q.slice(0, 1, 1).slice(2, 2, 2).slice(1, 7, 1), part.view().slice(1, 1, 1));
  const TensorView head = k.slice(0, 1, 1).slice(2, 1, 1);
  const OracleOutput got = oracle_attention(problem, part.view(), head, head, rows, 1, 2);
  for (std::size_t t = 0; t < 2; ++t) {
    for (std::size_t n = 0; n < 2; ++n) {
      const std::size_t global = t == 0 ? 3 : 7;
      EXPECT_EQ(got.lse[n * 2 + t], whole.lse[(4 + 2 + n) * 8 + global]);
      for (std::size_t d = 0; d < 3; ++d) {
        EXPECT_EQ(got.output[(t * 2 + n) * 3 + d],
                  whole.output[((8 + global) * 4 + 2 + n) * 3 + d]);
      }
    }
  }
}

TEST(Oracle, ColumnsInPiecesAreThoseOfTheWhole) {
  Random random(11);
  AttentionProblem problem = causal_problem_of({1, 4, 9, 2, 1, 3, 3}, DType::float32, 3);
  const Tensor query = random_tensor(random, DType::float32, {1, 4, 2, 3});
  const Tensor key = random_tensor(random, DType::float32, {1, 9, 1, 3});
  const auto columns = [&](std::int64_t first, std::int64_t count) {
    const ConstTensorView piece = key.view().slice(1, first, count);
    return oracle_attention(problem, query.view(), piece, piece, PositionRanges::all(4), 0, 0,
                            first);
  };
  const OracleOutput whole = columns(0, 9);
  const OracleOutput left = columns(0, 5);
  const OracleOutput right = columns(5, 4);
  for (std::size_t t = 0; t < 4; ++t) {
    for (std::size_t n = 0; n < 2; ++n) {
      const double lse = whole.lse[n * 4 + t];
      const double left_weight = std::exp(left.lse[n * 4 + t] - lse);
      const double right_weight = std::exp(right.lse[n * 4 + t] - lse);
      EXPECT_NEAR(left_weight + right_weight, 1, 1e-14);
      // The diagonal has reached the right piece by row 2.
      EXPECT_EQ(right.lse[n * 4 + t] == -kInfinity, t < 2);
      for (std::size_t i = (t * 2 + n) * 3; i < (t * 2 + n + 1) * 3; ++i) {
        EXPECT_NEAR(left_weight * left.output[i] + right_weight * right.output[i], whole.output[i],
                    1e-14);
      }
    }
  }
}

TEST(Oracle, ReadsHalfTypesExactly) {
  Random random(10);
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    AttentionProblem problem = problem_of({1, 3, 5, 1, 1, 4, 4});
    const Tensor query = random_tensor(random, dtype, {1, 3, 1, 4});
    const Tensor key = random_tensor(random, dtype, {1, 5, 1, 4});
    Tensor wide[2];
    for (int i = 0; i < 2; ++i) {
      const Tensor& source = i == 0 ? query : key;
      wide[i] = Tensor(DType::float32, source.shape(), test_memory());
      to_float32(source.view().data(), dtype, wide[i].view().as<float>(), source.shape().product());
    }
    const PositionRanges rows = PositionRanges::all(3);
    const OracleOutput half = oracle_attention(problem, query.view(), key.view(), key.view(), rows);
    const OracleOutput full =
        oracle_attention(problem, wide[0].view(), wide[1].view(), wide[1].view(), rows);
    EXPECT_EQ(half.output, full.output);
    EXPECT_EQ(half.lse, full.lse);
  }
}

// Two keys and a sink, whose logits are the same.
TEST(Oracle, TermsOfARow) {
  AttentionProblem problem = problem_of({1, 1, 3, 1, 1, 2, 2});
  problem.scale = 0.5;
  problem.mask.set_kv_lengths({2});
  problem.sinks = Sinks({1}, {1.0F});
  problem.bias = Extents{1, 1, 1, 3};
  WholeAttention whole =
      attention_of(problem, {2, -1}, {3, 2, 1, -6, 50, 50}, {3, 4, 0, 10, 70, 80});
  whole.bias = tensor_of(DType::float32, {1, 1, 1, 3}, {-1, -3, 100});
  const OracleOutput got = whole.oracle();
  ASSERT_EQ(got.terms.size(), 1U);
  EXPECT_NEAR(got.terms[0].root_square, std::sqrt(25.0 + 100.0) / 3, 1e-12);
  EXPECT_NEAR(got.terms[0].sum, 15.0 / 3, 1e-12);
  EXPECT_EQ(got.terms[0].largest_dot, 8);
  EXPECT_EQ(got.terms[0].largest_bias, 3);
  EXPECT_EQ(got.terms[0].largest_capped, 0);
  const Dropout& dropout = whole.problem.dropout.emplace(0.5, 3);
  const OracleOutput dropped = whole.oracle();
  double sum = 0;
  for (std::int64_t j = 0; j < 2; ++j) {
    const bool drops = dropout.drops(0, 0, GlobalPosition(0), GlobalPosition(j));
    if (!drops) sum += 2 * (j == 0 ? 5.0 : 10.0) / 3;
  }
  EXPECT_NEAR(dropped.terms[0].sum, sum, 1e-12);
}

// An infinite product is no term of a dot product that rounds, but its capped logit is finite.
TEST(Oracle, TermsOfAnInfiniteProductUnderACap) {
  AttentionProblem problem = problem_of({1, 1, 2, 1, 1, 1, 1});
  problem.soft_cap = 30;
  const OracleOutput got =
      attention_of(problem, {1}, {2, static_cast<float>(-kInfinity)}, {1, 1}).oracle();
  EXPECT_EQ(got.terms[0].largest_dot, 2);
  EXPECT_EQ(got.terms[0].largest_capped, 30);
}

}  // namespace
}  // namespace annulus::test
