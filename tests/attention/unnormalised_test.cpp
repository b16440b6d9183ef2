// Unnormalised outputs: the oracle against the formula, maxima of kernels, and what combine() makes
// of them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Σ exp(s − m) · v, m and Σ exp(s − m) of one row, from its logits and values.
struct Direct {
  double output = 0;
  double maximum = -kInfinity;
  double sum = 0;
};

Direct direct(const std::vector<double>& logits, const std::vector<double>& values) {
  Direct row;
  for (const double logit : logits) row.maximum = std::max(row.maximum, logit);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    row.sum += std::exp(logits[i] - row.maximum);
    row.output += std::exp(logits[i] - row.maximum) * values[i];
  }
  return row;
}

// --- The oracle.

TEST(Unnormalised, TheOracleIsTheFormula) {
  Random random(1);
  AttentionProblem problem = problem_of({2, 5, 7, 4, 2, 3, 1});
  problem.normalize_output = false;
  problem.mask.set_causal(true);
  problem.mask.set_query_lengths({5, 3});
  problem.soft_cap = 2.0;
  problem.dropout.emplace(0.4, 3);
  for (const bool sinks : {false, true}) {
    if (sinks) problem.sinks = Sinks({4, 2}, {0, 1, -2, 9, 3, 3, -1, -1});
    const WholeAttention whole = random_attention(random, problem);
    const OracleOutput got = whole.oracle();
    for_each_of<3>({2, 4, 5}, [&](auto b, auto n, auto t) {
      std::vector<double> logits;
      std::vector<double> values;
      for (std::int64_t j = 0; j < 7; ++j) {
        const GlobalPosition row(t);
        const GlobalPosition column(j);
        if (!problem.mask.visible(b, n, row, column)) continue;
        double logit = 0;
        for (std::int64_t d = 0; d < 3; ++d) {
          logit += whole.query.view().at<float>({b, t, n, d}) *
                   double{whole.key.view().at<float>({b, j, n / 2, d})};
        }
        logits.push_back(2 * std::tanh(logit / std::sqrt(3.0) / 2));
        const bool drops = problem.dropout->drops(b, n, row, column);
        values.push_back(drops ? 0
                               : problem.dropout->keep_scale() *
                                     whole.value.view().at<float>({b, j, n / 2, 0}));
      }
      if (sinks) {
        for (const float sink : problem.sinks->of_head(n)) {
          logits.push_back(sink);
          values.push_back(0);
        }
      }
      const Direct want = direct(logits, values);
      const auto row = static_cast<std::size_t>((b * 4 + n) * 5 + t);
      EXPECT_NEAR(got.output[static_cast<std::size_t>((b * 5 + t) * 4 + n)], want.output, 1e-13);
      EXPECT_NEAR(got.sum[row], want.sum, 1e-13);
      if (logits.empty()) {
        EXPECT_EQ(got.maximum[row], -kInfinity);
        EXPECT_EQ(got.lse[row], -kInfinity);
      } else {
        EXPECT_NEAR(got.maximum[row], want.maximum, 1e-14);
        EXPECT_NEAR(got.lse[row], want.maximum + std::log(want.sum), 1e-13);
      }
    });
  }
}

TEST(Unnormalised, ANormalisedOracleGivesTheSameMaximumAndSum) {
  Random random(2);
  AttentionProblem problem = problem_of({1, 6, 9, 2, 1, 4, 3});
  problem.mask.set_kv_lengths({4});
  WholeAttention whole = random_attention(random, problem);
  const OracleOutput normalised = whole.oracle();
  whole.problem.normalize_output = false;
  const OracleOutput got = whole.oracle();
  EXPECT_EQ(got.maximum, normalised.maximum);
  EXPECT_EQ(got.sum, normalised.sum);
  EXPECT_EQ(got.lse, normalised.lse);
  for (std::size_t t = 0; t < 6; ++t) {
    for (std::size_t n = 0; n < 2; ++n) {
      for (std::size_t d = 0; d < 3; ++d) {
        const std::size_t i = (t * 2 + n) * 3 + d;
        EXPECT_NEAR(got.output[i], normalised.output[i] * got.sum[n * 6 + t], 1e-14);
      }
    }
  }
}

// --- combine().

struct OwnedState : Result {
  explicit OwnedState(const Extents& shape, DType dtype = DType::float32,
                      DType lse_dtype = DType::float64)
      : Result(shape, lse_dtype, dtype), maximum(DType::float32, lse.shape(), test_memory()) {
    std::memset(maximum.view().data(), 0xff, maximum.bytes());
  }
  [[nodiscard]] SoftmaxState state() const { return {output.view(), lse.view(), maximum.view()}; }
  Tensor maximum;
};

// One row [1,1,1,1] over some of the logits, normalised as kernels hand it over.
OwnedState piece_of(const std::vector<double>& logits, const std::vector<double>& values,
                    std::size_t begin, std::size_t end) {
  const Direct row = direct({logits.begin() + static_cast<std::ptrdiff_t>(begin),
                             logits.begin() + static_cast<std::ptrdiff_t>(end)},
                            {values.begin() + static_cast<std::ptrdiff_t>(begin),
                             values.begin() + static_cast<std::ptrdiff_t>(end)});
  OwnedState piece({1, 1, 1, 1});
  *piece.output.view().as<float>() = static_cast<float>(row.sum > 0 ? row.output / row.sum : 0);
  *piece.lse.view().as<double>() = row.maximum + std::log(row.sum);
  *piece.maximum.view().as<float>() = static_cast<float>(row.maximum);
  return piece;
}

// Logits that float32 holds exactly.
std::vector<double> exact_logits(Random& random, std::size_t count, double centre) {
  std::vector<double> logits;
  for (std::size_t i = 0; i < count; ++i) {
    logits.push_back(centre + static_cast<double>(draw(random, -64, 64)) / 16);
  }
  return logits;
}

TEST(Unnormalised, PartsCombineIntoTheFormulaAtOnceAndInSteps) {
  Random random(3);
  std::normal_distribution<double> normal;
  for (const double centre : {0.0, 50.0, -50.0, 1e4}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const std::vector<double> logits = exact_logits(random, 24, centre);
      std::vector<double> values;
      for (int i = 0; i < 24; ++i) values.push_back(normal(random));
      const Direct want = direct(logits, values);
      const auto cut = static_cast<std::size_t>(draw(random, 0, 24));
      const OwnedState first = piece_of(logits, values, 0, cut);
      const OwnedState second = piece_of(logits, values, cut, 24);
      const OwnedState nothing = piece_of(logits, values, 3, 3);
      const OwnedState at_once({1, 1, 1, 1}, DType::float32, DType::float32);
      const std::vector<PartialState> parts{{nothing.state()}, {first.state()}, {second.state()}};
      combine(parts, at_once.state(), SoftmaxForm::unnormalised);
      const OwnedState folded({1, 1, 1, 1});
      combine(parts, folded.state());
      EXPECT_EQ(*folded.maximum.view().as<float>(), want.maximum);
      EXPECT_NEAR(*folded.lse.view().as<double>(), want.maximum + std::log(want.sum), 1e-10);
      const OwnedState in_steps({1, 1, 1, 1}, DType::float32, DType::float32);
      combine(std::vector<PartialState>{{folded.state()}}, in_steps.state(),
              SoftmaxForm::unnormalised);
      for (const OwnedState* got : {&at_once, &in_steps}) {
        EXPECT_EQ(*got->maximum.view().as<float>(), want.maximum);
        EXPECT_NEAR(*got->lse.view().as<float>(), want.sum, 2e-6 * want.sum);
        EXPECT_NEAR(*got->output.view().as<float>(), want.output, 4e-6 * want.sum);
      }
    }
  }
}

TEST(Unnormalised, OneKeyIsItsValueAndItsLogit) {
  const OwnedState piece = piece_of({-3.25}, {7}, 0, 1);
  const OwnedState got({1, 1, 1, 1}, DType::float32, DType::float32);
  combine(std::vector<PartialState>{{piece.state()}}, got.state(), SoftmaxForm::unnormalised);
  EXPECT_EQ(*got.output.view().as<float>(), 7);
  EXPECT_EQ(*got.maximum.view().as<float>(), -3.25F);
  EXPECT_EQ(*got.lse.view().as<float>(), 1);
}

TEST(Unnormalised, RowsWithoutWeight) {
  const OwnedState empty = piece_of({1}, {1}, 0, 0);
  const OwnedState weightless = piece_of({1}, {1}, 0, 0);
  *weightless.output.view().as<float>() = kNan;  // it saw only logits of −∞
  const OwnedState spoilt = piece_of({1}, {1}, 0, 1);
  for (const Tensor* tensor : {&spoilt.output, &spoilt.maximum}) {
    *tensor->view().as<float>() = kNan;
  }
  *spoilt.lse.view().as<double>() = kNan;
  const OwnedState whole = piece_of({2, 2}, {5, 6}, 0, 2);
  const auto combined = [](const std::vector<PartialState>& parts) {
    OwnedState got({1, 1, 1, 1}, DType::float32, DType::float32);
    combine(parts, got.state(), SoftmaxForm::unnormalised);
    return std::vector{*got.output.view().as<float>(), *got.maximum.view().as<float>(),
                       *got.lse.view().as<float>()};
  };
  const auto minus_infinity = static_cast<float>(-kInfinity);
  EXPECT_EQ(combined({}), (std::vector{0.0F, minus_infinity, 0.0F}));
  EXPECT_EQ(combined({{empty.state()}}), (std::vector{0.0F, minus_infinity, 0.0F}));
  const std::vector<float> of_weightless = combined({{empty.state()}, {weightless.state()}});
  EXPECT_TRUE(std::isnan(of_weightless[0]));
  EXPECT_EQ(of_weightless[1], minus_infinity);
  EXPECT_EQ(of_weightless[2], 0);
  EXPECT_EQ(combined({{weightless.state()}, {whole.state()}}), (std::vector{11.0F, 2.0F, 2.0F}));
  for (const float number : combined({{whole.state()}, {spoilt.state()}})) {
    EXPECT_TRUE(std::isnan(number));
  }
}

TEST(Unnormalised, CombinesPartsOfRowsInPlaceAndRounds) {
  Random random(4);
  const Extents shape{2, 5, 3, 4};
  OwnedState first(shape);
  OwnedState second({2, 2, 2, 4});
  for (const OwnedState* state : {&first, &second}) {
    for (std::int64_t i = 0; i < state->output.shape().product(); ++i) {
      state->output.view().as<float>()[i] = static_cast<float>(draw(random, -8, 8));
    }
    for (std::int64_t i = 0; i < state->lse.shape().product(); ++i) {
      const auto maximum = static_cast<float>(draw(random, -3, 3));
      state->maximum.view().as<float>()[i] = maximum;
      state->lse.view().as<double>()[i] = maximum + static_cast<double>(draw(random, 0, 20)) / 10;
    }
  }
  const std::vector<PartialState> parts{{first.state()}, {second.state(), 2, 1}};
  const OwnedState apart(shape);
  combine(parts, apart.state(), SoftmaxForm::unnormalised);
  const OwnedState rounded(shape, DType::float16, DType::float32);
  combine(parts, rounded.state(), SoftmaxForm::unnormalised);
  for_each_of<3>({2, 5, 3}, [&](auto b, auto t, auto n) {
    double maximum = first.maximum.view().at<float>({b, n, t});
    const bool both = t >= 2 && t < 4 && n >= 1;
    if (both) {
      maximum = std::max<double>(maximum, second.maximum.view().at<float>({b, n - 1, t - 2}));
    }
    const double weight = std::exp(first.state().lse_at(b, n, t) - maximum);
    const double other = both ? std::exp(second.state().lse_at(b, n - 1, t - 2) - maximum) : 0.0;
    EXPECT_EQ(apart.maximum.view().at<float>({b, n, t}), maximum);
    EXPECT_NEAR(apart.lse.view().at<double>({b, n, t}), weight + other, 1e-12);
    for (std::int64_t d = 0; d < 4; ++d) {
      double want = weight * first.output.view().at<float>({b, t, n, d});
      if (both) want += other * second.output.view().at<float>({b, t - 2, n - 1, d});
      const float got = apart.output.view().at<float>({b, t, n, d});
      EXPECT_NEAR(got, want, 1e-5);
      EXPECT_EQ(static_cast<float>(rounded.output.view().at<Float16>({b, t, n, d})),
                static_cast<float>(Float16(got)));
    }
  });
  combine(parts, first.state(), SoftmaxForm::unnormalised);
  EXPECT_TRUE(first == apart);
  EXPECT_EQ(
      std::memcmp(first.maximum.view().data(), apart.maximum.view().data(), apart.maximum.bytes()),
      0);
}

TEST(Unnormalised, CombineRefusesMaximaThatAreMissingOrDoNotFit) {
  const OwnedState part({1, 2, 3, 4});
  const OwnedState result({1, 2, 3, 4});
  const SoftmaxState without{result.output.view(), result.lse.view()};
  const auto error = [](const PartialState& one, const SoftmaxState& into, SoftmaxForm form) {
    return message_of<InternalError>([&] { combine(std::vector<PartialState>{one}, into, form); });
  };
  EXPECT_THAT(error({part.state()}, without, SoftmaxForm::unnormalised),
              HasSubstr("without a maximum"));
  EXPECT_EQ(error({part.state()}, without, SoftmaxForm::normalised), "nothing thrown");
  EXPECT_THAT(
      error({{part.output.view(), part.lse.view()}}, result.state(), SoftmaxForm::normalised),
      HasSubstr("a part has no maximum"));
  EXPECT_THAT(error({{part.output.view(), part.lse.view(), part.lse.view()}}, result.state(),
                    SoftmaxForm::normalised),
              HasSubstr("output and maximum do not fit"));
  EXPECT_THAT(error({part.state()},
                    {result.output.view(), result.lse.view(), result.maximum.view().slice(2, 0, 1)},
                    SoftmaxForm::normalised),
              HasSubstr("output and maximum do not fit"));
}

// --- Kernels.

OwnedState run(const char* name, const AttentionProblem& problem, const AttentionBlock& block,
               DType dtype = DType::float32) {
  static const Registry registry = Registry::standard();
  OwnedState result(
      {block.query.size(0), block.query.size(1), block.query.size(2), block.value.size(3)}, dtype);
  forward_on_cpu(registry.get(name), problem, block, result.state());
  return result;
}

// The maxima of other kernels are compared in tests/attention/suite.
TEST(Unnormalised, VanillaInFloat64) {
  Random random(7);
  AttentionProblem problem = problem_of({1, 9, 11, 2, 1, 4, 3});
  problem.softmax_dtype = DType::float64;
  problem.normalize_output = false;
  WholeAttention whole = random_attention(random, problem);
  whole.problem.dtype = DType::float64;
  for (Tensor* tensor : {&whole.query, &whole.key, &whole.value}) {
    Tensor wide(DType::float64, tensor->shape(), test_memory());
    std::copy_n(tensor->view().as<float>(), tensor->shape().product(), wide.view().as<double>());
    *tensor = std::move(wide);
  }
  const OracleOutput truth = whole.oracle();
  const OwnedState got = run("vanilla", whole.problem, whole.block(), DType::float64);
  const OwnedState complete({1, 9, 2, 3}, DType::float64);
  combine(std::vector<PartialState>{{got.state()}}, complete.state(), SoftmaxForm::unnormalised);
  for (std::size_t row = 0; row < truth.sum.size(); ++row) {
    const double maximum = complete.maximum.view().as<float>()[row];
    EXPECT_EQ(maximum, got.maximum.view().as<float>()[row]);
    EXPECT_NEAR(maximum, truth.maximum[row], 1e-6);
    EXPECT_NEAR(maximum + std::log(complete.lse.view().as<double>()[row]), truth.lse[row], 1e-12);
  }
  // Relative to a maximum that is rounded.
  for (std::size_t i = 0; i < truth.output.size(); ++i) {
    EXPECT_NEAR(complete.output.view().as<double>()[i], truth.output[i], 1e-5);
  }
}

TEST(Unnormalised, KernelsLeaveAMaximumThatNobodyWants) {
  Random random(9);
  const AttentionProblem problem = problem_of({1, 5, 6, 2, 1, 4, 4});
  const WholeAttention whole = random_attention(random, problem);
  const OwnedState with = run("native", problem, whole.block());
  const Result without = run_native(problem, whole.block(), 1, DType::float64);
  EXPECT_TRUE(with == without);
}

TEST(Unnormalised, NativeRefusesAMaximumThatDoesNotFit) {
  Random random(10);
  const AttentionProblem problem = problem_of({1, 5, 6, 2, 1, 4, 4});
  const WholeAttention whole = random_attention(random, problem);
  const OwnedState result({1, 5, 2, 4});
  for (const TensorView& maximum : {result.lse.view(), result.maximum.view().slice(2, 0, 4)}) {
    EXPECT_THROW(forward_on_cpu(native(), problem, whole.block(),
                                {result.output.view(), result.lse.view(), maximum}),
                 InternalError);
  }
}

TEST(Unnormalised, OnlySomeImplementationsDoIt) {
  const Registry registry = Registry::standard();
  AttentionProblem problem = problem_of({1, 128, 128, 2, 1, 64, 64}, DType::bfloat16);
  problem.normalize_output = false;
  for (const char* name : {"sdpa", "flash_attn2", "blocksparse"}) {
    EXPECT_THAT(registry.get(name).fits(problem, Place::cuda(0)).reason(),
                HasSubstr("an unnormalised output"))
        << name;
  }
  EXPECT_TRUE(registry.get("native").fits(problem, Place::host()));
  EXPECT_TRUE(registry.get("native").fits(problem, Place::cuda(0)));
  EXPECT_TRUE(registry.get("vanilla").fits(problem, Place::host()));
  const Selection chosen = registry.select("auto", problem, Place::host());
  EXPECT_EQ(chosen.candidates.front()->names().front(), "native");
}

}  // namespace
}  // namespace annulus::test
