// Bias and dense mask: shapes, policies, and what they mean in the oracle.
#include <cmath>
#include <limits>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/features.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/problem_of.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(ScoreTensors, BroadcastDimensionsHaveStrideZero) {
  Random random(1);
  for (const Extents& shape : score_shapes(2, 3, 4, 5)) {
    const Tensor small = random_tensor(random, DType::float32, shape);
    const ConstTensorView view = broadcast_to(small.view(), {2, 3, 4, 5});
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t n = 0; n < 3; ++n) {
        for (std::int64_t t = 0; t < 4; ++t) {
          for (std::int64_t s = 0; s < 5; ++s) {
            const auto index = [&](int dim, std::int64_t i) { return shape[dim] == 1 ? 0 : i; };
            ASSERT_EQ(view.at<float>({b, n, t, s}),
                      small.view().at<float>({index(0, b), index(1, n), index(2, t), index(3, s)}));
          }
        }
      }
    }
  }
}

TEST(ScoreTensors, AreThoseOfTheProblem) {
  Random random(2);
  AttentionProblem problem = problem_of({1, 2, 3, 2, 1, 4, 4});
  const Extents shape{1, 2, 2, 3};
  const Tensor bias = random_tensor(random, DType::float32, shape);
  const Tensor mask = random_dense_mask(random, shape);
  const auto message = [&](const ScoreTensors& scores) {
    return message_of<InternalError>([&] { scores.check(problem, {1, 2, 2, 4}, 2); });
  };
  constexpr const char* kFine = "nothing thrown";
  EXPECT_EQ(message({}), kFine);
  EXPECT_THAT(message({bias.view(), {}}), HasSubstr("bias is not expected"));
  EXPECT_THAT(message({{}, mask.view()}), HasSubstr("dense mask is not expected"));
  problem.bias = problem.dense_mask = shape;
  EXPECT_EQ(message({bias.view(), mask.view()}), kFine);
  EXPECT_THAT(message({{}, mask.view()}), HasSubstr("bias is missing"));
  EXPECT_THAT(message({bias.view(), bias.view()}), HasSubstr("float32"));
  EXPECT_THAT(message({bias.view().slice(2, 0, 1), mask.view()}), HasSubstr("[1, 2, 1, 3]"));
  EXPECT_THAT(message({bias.view(), mask.view(), true}),
              HasSubstr("expected float32 [1, 2, 2, 2]"));
  EXPECT_EQ(message({bias.view().slice(3, 1, 2), mask.view().slice(3, 1, 2), true}), kFine);
}

TEST(ScoreTensors, KeysAreThoseOfTheProblemOrOfTheCall) {
  const PositionRange positions{GlobalPosition(7), 5, 3};
  const ScoreTensors::Keys of_problem = ScoreTensors{}.keys_of(2, positions);
  EXPECT_EQ(of_problem.first, 7);
  EXPECT_EQ(of_problem.step, 3);
  EXPECT_EQ(of_problem.count, 5);
  const ScoreTensors by_column{.by_column = true};
  const ScoreTensors::Keys of_call = by_column.keys_of(2, positions);
  EXPECT_EQ(of_call.first, 2);
  EXPECT_EQ(of_call.step, 1);
  EXPECT_EQ(of_call.count, 5);
  EXPECT_EQ(ScoreTensors{}.key_of(3, positions.at(1)), 10);
  EXPECT_EQ(by_column.key_of(3, positions.at(1)), 3);
}

TEST(AttentionProblem, BiasAndMaskFitTheShape) {
  AttentionProblem problem = problem_of({2, 5, 7, 4, 2, 8, 8});
  for (std::optional<Extents> AttentionProblem::*scores :
       {&AttentionProblem::bias, &AttentionProblem::dense_mask}) {
    const char* const name = scores == &AttentionProblem::bias ? "bias" : "dense mask";
    for (const Extents& shape : score_shapes(2, 4, 5, 7)) {
      problem.*scores = shape;
      EXPECT_NO_THROW(problem.validate());
    }
    for (const Extents& shape : {Extents{2, 4, 5, 6}, Extents{2, 2, 5, 7}, Extents{3, 4, 5, 7},
                                 Extents{2, 4, 0, 7}, Extents{4, 5, 7}, Extents{1, 2, 4, 5, 7}}) {
      problem.*scores = shape;
      EXPECT_THAT(message_of<ArgumentError>([&] { problem.validate(); }),
                  AllOf(HasSubstr(name), HasSubstr(to_string(shape)),
                        HasSubstr("[B,N,T,S] = [2, 4, 5, 7]")));
    }
    problem.*scores = {};
  }
  constexpr std::int64_t kLong = std::int64_t{1} << 29;
  problem.shape = {1, kLong, kLong, 8, 8, 1, 1};
  problem.bias = Extents{1, 8, kLong, kLong};
  EXPECT_THAT(message_of<ArgumentError>([&] { problem.validate(); }), HasSubstr("2^60"));
}

TEST(Features, BiasAndDenseMaskAreAsked) {
  AttentionProblem problem = problem_of({1, 2, 3, 1, 1, 1, 1});
  problem.bias = Extents{1, 1, 1, 3};
  problem.dense_mask = Extents{1, 1, 2, 1};
  EXPECT_EQ(features_of(problem), (FeatureSet{Feature::bias, Feature::dense_mask}));
  EXPECT_EQ(to_string(features_of(problem)), "a bias, a dense mask");
}

TEST(BiasPolicy, NamesAndErrors) {
  for (const BiasPolicy policy :
       {BiasPolicy::combine, BiasPolicy::bias_wins, BiasPolicy::bias_disables_causal}) {
    EXPECT_EQ(parse_bias_policy(name_of(policy)), policy);
  }
  EXPECT_THAT(message_of<ArgumentError>([] { (void)parse_bias_policy("both"); }),
              AllOf(HasSubstr("bias policy"), HasSubstr("both"), HasSubstr("combine"),
                    HasSubstr("bias_wins"), HasSubstr("bias_disables_causal")));
}

TEST(BiasPolicy, DecidesWhatIsLeftOfTheMask) {
  AttentionProblem problem = causal_problem_of({1, 4, 4, 1, 1, 1, 1});
  problem.mask.set_window(2, 2);
  problem.mask.set_kv_lengths({3});
  problem.dense_mask = Extents{1, 1, 4, 4};
  for (const BiasPolicy policy : {BiasPolicy::bias_wins, BiasPolicy::bias_disables_causal}) {
    const AttentionProblem same = under_policy(policy, problem);  // there is no bias
    EXPECT_EQ(same.mask.digest(), problem.mask.digest());
    EXPECT_TRUE(same.dense_mask);
  }
  problem.bias = Extents{1, 1, 1, 4};
  const AttentionProblem both = under_policy(BiasPolicy::combine, problem);
  EXPECT_EQ(both.mask.digest(), problem.mask.digest());
  EXPECT_TRUE(both.dense_mask);
  const AttentionProblem alone = under_policy(BiasPolicy::bias_wins, problem);
  EXPECT_FALSE(alone.mask.hides_any());
  EXPECT_FALSE(alone.dense_mask);
  EXPECT_TRUE(alone.bias);
  const AttentionProblem open = under_policy(BiasPolicy::bias_disables_causal, problem);
  EXPECT_FALSE(open.mask.causal());
  EXPECT_EQ(open.mask.window_right(), 2);
  EXPECT_FALSE(open.mask.kv_lengths().empty());
  EXPECT_TRUE(open.dense_mask);
}

// One query, two keys with the logits 1 and 2.5 before the bias.
OracleOutput two_keys(const std::optional<double>& soft_cap, const std::vector<float>& bias,
                      const std::vector<std::uint8_t>& visible = {1, 1},
                      const std::vector<float>& values = {1.0F, 0.0F}) {
  AttentionProblem problem = problem_of({1, 1, 2, 1, 1, 1, 1});
  problem.soft_cap = soft_cap;
  problem.bias = problem.dense_mask = Extents{1, 1, 1, 2};
  WholeAttention whole = attention_of(problem, {2}, {0.5F, 1.25F}, values);
  whole.bias = tensor_of(DType::float32, *problem.bias, bias);
  whole.mask = Tensor(DType::boolean, *problem.bias, test_memory());
  std::ranges::copy(visible, static_cast<std::uint8_t*>(whole.mask.view().data()));
  return whole.oracle();
}

TEST(OracleScores, ABiasIsAddedAfterTheSoftCap) {
  const OracleOutput got = two_keys({}, {0.5F, -2.0F});
  EXPECT_NEAR(got.output[0], 1.0 / (1.0 + std::exp(0.5 - 1.5)), 1e-15);
  EXPECT_NEAR(got.lse[0], std::log(std::exp(1.5) + std::exp(0.5)), 1e-15);
  const OracleOutput capped = two_keys(1.5, {0.5F, -2.0F});
  const double a = 1.5 * std::tanh(1 / 1.5) + 0.5;
  const double b = 1.5 * std::tanh(2.5 / 1.5) - 2;
  EXPECT_NEAR(capped.lse[0], std::log(std::exp(a) + std::exp(b)), 1e-15);
}

TEST(OracleScores, WhatIsHiddenReachesNoRow) {
  for (const float hidden : {kInfinity, -kInfinity, std::nanf("")}) {
    const OracleOutput got = two_keys({}, {0.5F, hidden}, {1, 0}, {3.0F, std::nanf("")});
    EXPECT_EQ(got.output[0], 3);
    EXPECT_DOUBLE_EQ(got.lse[0], 1.5);
  }
  const OracleOutput by_bias = two_keys({}, {0.5F, -kInfinity}, {1, 1}, {3.0F, std::nanf("")});
  EXPECT_EQ(by_bias.output[0], 3);
  EXPECT_DOUBLE_EQ(by_bias.lse[0], 1.5);
}

TEST(OracleScores, RowsThatSeeNothingAreEmpty) {
  for (const OracleOutput& got :
       {two_keys({}, {0, 0}, {0, 0}), two_keys({}, {-kInfinity, -kInfinity}),
        two_keys({}, {-kInfinity, 0}, {1, 0})}) {
    EXPECT_EQ(got.output[0], 0);
    EXPECT_EQ(got.lse[0], -kInfinity);
  }
}

TEST(OracleScores, NanAndInfinityOfABiasShow) {
  for (const float seen : {kInfinity, std::nanf("")}) {
    EXPECT_TRUE(std::isnan(two_keys({}, {0, seen}).output[0]));
  }
}

// A bias of 0 and −∞ is a mask.
TEST(OracleScores, AMaskGivenAsABiasIsAMask) {
  Random random(3);
  AttentionProblem masked = problem_of({2, 7, 9, 4, 2, 3, 3});
  masked.dense_mask = Extents{2, 4, 7, 9};
  WholeAttention whole = random_attention(random, masked);
  const OracleOutput a = whole.oracle();
  const Tensor mask = std::exchange(whole.mask, {});
  std::swap(whole.problem.bias, whole.problem.dense_mask);
  whole.bias = Tensor(DType::float32, mask.shape(), test_memory());
  for (std::int64_t i = 0; i < mask.view().elements(); ++i) {
    const auto* const shows = static_cast<const std::uint8_t*>(mask.view().data());
    whole.bias.view().as<float>()[i] = shows[i] != 0 ? 0 : -kInfinity;
  }
  const OracleOutput b = whole.oracle();
  EXPECT_EQ(a.output, b.output);
  EXPECT_EQ(a.lse, b.lse);
}

}  // namespace
}  // namespace annulus::test
