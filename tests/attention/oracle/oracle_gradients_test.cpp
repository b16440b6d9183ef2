#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/attention/gradients_run.hpp"
#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

// A problem in float64 with a loss Σ dO ∘ O + Σ dLSE ∘ LSE, whose gradients are known by
// differences.
struct Case : WholeAttention {
  Case(Random& random, AttentionProblem of)
      : WholeAttention(random_operands(random, in_float64(std::move(of)))),
        grad_output(random_operand(random, DType::float64,
                                   {s().batch, s().query_length, s().heads, s().value_dim})),
        grad_lse(random_operand(random, DType::float64, {s().batch, s().heads, s().query_length})) {
  }

  [[nodiscard]] const AttentionShape& s() const { return problem.shape; }

  [[nodiscard]] double loss() const {
    const OracleOutput got = oracle();
    double sum = 0;
    const auto* weight = grad_output.view().as<double>();
    for (const double x : got.output) sum += *weight++ * x;
    weight = grad_lse.view().as<double>();
    for (const double x : got.lse) {
      if (x != -std::numeric_limits<double>::infinity()) sum += *weight * x;
      ++weight;
    }
    return sum;
  }

  [[nodiscard]] OracleGradients gradients() const {
    return oracle_gradients(problem, query.view(), key.view(), value.view(), grad_output.view(),
                            grad_lse.view(), rows(), 0, 0, 0, scores());
  }

  static AttentionProblem in_float64(AttentionProblem problem) {
    problem.dtype = DType::float64;
    return problem;
  }

  Tensor grad_output, grad_lse;
};

// The derivative of the loss by an entry that `step` moves by so much, to the fourth order.
double difference(const Case& one, const std::function<void(double)>& step, double h) {
  const auto at = [&](double by) {
    step(by);
    const double loss = one.loss();
    step(-by);
    return loss;
  };
  return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
}

void expect_near(double found, double expected, double tolerance, const std::string& name) {
  EXPECT_NEAR(found, expected, tolerance * (1 + std::abs(expected))) << name;
}

// Entries of queries, keys, values, bias and sinks, some of each.
void expect_right(Random& random, Case one, const std::string& name) {
  const OracleGradients got = one.gradients();
  const auto check = [&](const Tensor& tensor, const OracleGradient& gradient, const char* what) {
    ASSERT_EQ(static_cast<std::int64_t>(gradient.values.size()), tensor.shape().product());
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = draw(random, 0, tensor.shape().product() - 1);
      double& entry = tensor.view().as<double>()[at];
      const double expected = difference(
          one, [&](double by) { entry += by; }, 1e-3);
      expect_near(gradient.values[static_cast<std::size_t>(at)], expected, 1e-8,
                  name + ", " + what + " " + std::to_string(at));
    }
    for (std::size_t i = 0; i < gradient.values.size(); ++i) {
      ASSERT_LE(std::abs(gradient.values[i]), gradient.magnitudes[i] * (1 + 1e-12)) << name;
    }
  };
  check(one.query, got.query, "query");
  check(one.key, got.key, "key");
  check(one.value, got.value, "value");
  if (one.problem.bias) {
    ASSERT_EQ(static_cast<std::int64_t>(got.bias.values.size()), one.problem.bias->product());
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = draw(random, 0, one.problem.bias->product() - 1);
      // A float32 bias moves by what float32 holds.
      float& entry = one.bias.view().as<float>()[at];
      entry = std::round(entry * 16) / 16;
      const double found = one.gradients().bias.values[static_cast<std::size_t>(at)];
      const double expected = difference(
          one, [&](double by) { entry += static_cast<float>(by); }, 0x1p-8);
      expect_near(found, expected, 1e-7, name + ", bias " + std::to_string(at));
    }
  }
  if (!one.problem.sinks) return;
  const Sinks sinks = *one.problem.sinks;
  const std::int64_t heads = sinks.shape().rank() == 2 ? sinks.shape()[0] : 1;
  std::vector<float> logits;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (const float logit : sinks.of_head(head)) logits.push_back(std::round(logit * 16) / 16);
  }
  one.problem.sinks = Sinks(sinks.shape(), logits);
  const OracleGradient found = one.gradients().sinks;
  ASSERT_EQ(found.values.size(), logits.size());
  for (std::size_t m = 0; m < logits.size(); ++m) {
    const double expected = difference(
        one,
        [&](double by) {
          logits[m] += static_cast<float>(by);
          one.problem.sinks = Sinks(sinks.shape(), logits);
        },
        0x1p-8);
    expect_near(found.values[m], expected, 1e-7, name + ", sink " + std::to_string(m));
  }
}

TEST(OracleGradients, EveryMask) {
  Random random(41);
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    AttentionProblem problem = problem_of({2, 7, 9, 4, 2, 3, 5});
    problem.mask = random_mask(random, kinds, 2, 7, 9);
    expect_right(random, Case(random, problem), to_string(problem.mask));
    problem.mask.set_block_mask(random_block_mask(random, 2, 4, 7, 9, 4));
    expect_right(random, Case(random, problem), to_string(problem.mask));
  }
}

TEST(OracleGradients, EveryModifier) {
  Random random(42);
  for (unsigned chosen = 0; chosen < 64; ++chosen) {
    const auto has = [&](unsigned bit) { return (chosen >> bit & 1U) != 0; };
    AttentionProblem problem = problem_of({2, 6, 8, 6, 3, 4, 2});
    problem.mask.set_causal(has(0));
    problem.mask.set_offset(draw(random, -2, 3));
    if (has(1)) problem.scale = 0.8;
    if (has(2)) problem.soft_cap = 1.2;
    if (has(3)) problem.dropout.emplace(0.4, chosen);
    if (has(4)) {
      Extents shape{2, 6, 6, 8};
      for (int dim = 0; dim < 4; ++dim) {
        if (draw(random, 0, 1) == 0) shape[dim] = 1;
      }
      problem.bias = shape;
      problem.dense_mask = Extents{1, 6, 6, 8};
    }
    if (has(5)) {
      problem.sinks =
          draw(random, 0, 1) == 0 ? Sinks::random(6, 2, chosen) : Sinks({3}, {0.25F, -1.0F, 1.5F});
    }
    expect_right(random, Case(random, problem), std::to_string(chosen));
  }
}

// The gradients of some rows, heads and batches add up to the gradients of all.
TEST(OracleGradients, PartsAddUp) {
  Random random(43);
  AttentionProblem problem = causal_problem_of({2, 8, 8, 4, 2, 3, 3});
  problem.dropout.emplace(0.3, 5);
  problem.sinks = Sinks({4, 1}, {1, -1, 0, 2});
  const Case one(random, problem);
  const OracleGradients whole = one.gradients();
  std::vector<double> keys(whole.key.values.size(), 0.0);
  std::vector<double> sinks(4, 0.0);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t k = 0; k < 2; ++k) {
      for (std::int64_t first = 0; first < 2; ++first) {
        // Every other row, from `first` on.
        const PositionRanges rows({PositionRange{GlobalPosition(first), 4, 2}});
        const auto part = [&](const Tensor& tensor) {
          Tensor picked(DType::float64, {1, 4, 2, 3}, test_memory());
          for_each_of<3>({4, 2, 3}, [&](auto t, auto n, auto d) {
            picked.view().at<double>({0, t, n, d}) =
                tensor.view().at<double>({b, first + 2 * t, k * 2 + n, d});
          });
          return picked;
        };
        Tensor grad_lse(DType::float64, {1, 2, 4}, test_memory());
        for (std::int64_t n = 0; n < 2; ++n) {
          for (std::int64_t t = 0; t < 4; ++t) {
            grad_lse.view().at<double>({0, n, t}) =
                one.grad_lse.view().at<double>({b, k * 2 + n, first + 2 * t});
          }
        }
        const Tensor query = part(one.query);
        const Tensor grad_output = part(one.grad_output);
        const OracleGradients got = oracle_gradients(
            one.problem, query.view(), one.key.view().slice(0, b, 1).slice(2, k, 1),
            one.value.view().slice(0, b, 1).slice(2, k, 1), grad_output.view(), grad_lse.view(),
            rows, b, k * 2);
        for_each_of<3>({4, 2, 3}, [&](auto t, auto n, auto d) {
          const std::int64_t of_whole = ((b * 8 + first + 2 * t) * 4 + k * 2 + n) * 3 + d;
          EXPECT_DOUBLE_EQ(got.query.values[static_cast<std::size_t>((t * 2 + n) * 3 + d)],
                           whole.query.values[static_cast<std::size_t>(of_whole)]);
        });
        for (std::int64_t j = 0; j < 8; ++j) {
          for (std::int64_t d = 0; d < 3; ++d) {
            keys[static_cast<std::size_t>(((b * 8 + j) * 2 + k) * 3 + d)] +=
                got.key.values[static_cast<std::size_t>(j * 3 + d)];
          }
        }
        for (std::size_t n = 0; n < 2; ++n) {
          sinks[static_cast<std::size_t>(k) * 2 + n] += got.sinks.values[n];
        }
      }
    }
  }
  for (std::size_t i = 0; i < keys.size(); ++i) EXPECT_NEAR(keys[i], whole.key.values[i], 1e-13);
  for (std::size_t i = 0; i < sinks.size(); ++i) {
    EXPECT_NEAR(sinks[i], whole.sinks.values[i], 1e-13);
  }
}

// Hidden keys and values may hold anything, and rows whose logits are all −∞ add nothing.
TEST(OracleGradients, RowsThatSeeNothing) {
  Random random(44);
  AttentionProblem problem =
      causal_problem_of({1, 3, 4, 1, 1, 2, 2}, DType::float32, -1);  // row 0 sees nothing
  const Case one(random, problem);
  for (std::int64_t d = 0; d < 2; ++d) {
    one.key.view().at<double>({0, 3, 0, d}) = std::nan("");
    one.value.view().at<double>({0, 2, 0, d}) = std::nan("");
    one.value.view().at<double>({0, 3, 0, d}) = std::nan("");
    // Row 1 sees key 0 alone.
    one.query.view().at<double>({0, 1, 0, d}) = std::numeric_limits<double>::infinity();
    one.key.view().at<double>({0, 0, 0, d}) = -1;
    one.query.view().at<double>({0, 2, 0, d}) = 1;
  }
  const OracleGradients got = one.gradients();
  for (std::size_t d = 0; d < 4; ++d) EXPECT_EQ(got.query.values[d], 0) << d;
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(std::isfinite(got.key.values[i])) << i;
    EXPECT_TRUE(std::isfinite(got.value.values[i])) << i;
    if (i >= 4) {
      EXPECT_EQ(got.key.values[i], 0);
      EXPECT_EQ(got.value.values[i], 0);
    }
  }
}

// A broadcast bias adds up what the same bias in full has: values and magnitudes of its entries,
// and squares of what each row has.
TEST(OracleGradients, BroadcastBiases) {
  Random random(46);
  const AttentionShape shape{2, 3, 4, 2, 1, 3, 3};
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    AttentionProblem problem = problem_of(shape);
    const auto size = [&](int dim, std::int64_t all) {
      return (broadcast >> dim & 1) != 0 ? 1 : all;
    };
    problem.bias = Extents{size(0, 2), size(1, 2), size(2, 3), size(3, 4)};
    Case one(random, problem);
    const OracleGradients found = one.gradients();
    const Tensor part = std::move(one.bias);
    one.problem.bias = Extents{2, 2, 3, 4};
    one.bias = Tensor(DType::float32, *one.problem.bias, test_memory());
    copy(broadcast_to(part.view(), *one.problem.bias), one.bias.view());
    const OracleGradients full = one.gradients();
    std::vector<double> values(found.bias.values.size()), magnitudes(values), squares(values);
    const Extents& kept = *problem.bias;
    for (std::int64_t row = 0; row < 2 * 2 * 3; ++row) {  // of [B,N,T]
      const std::array<std::int64_t, 3> at{row / 6, row / 3 % 2, row % 3};
      std::int64_t first = 0;
      for (int dim = 0; dim < 3; ++dim) {
        first = first * kept[dim] + (kept[dim] == 1 ? 0 : at[static_cast<std::size_t>(dim)]);
      }
      std::vector<double> of_row(static_cast<std::size_t>(kept[3]));
      for (std::int64_t s = 0; s < 4; ++s) {
        const auto from = static_cast<std::size_t>(row * 4 + s);
        const std::int64_t key = kept[3] == 1 ? 0 : s;
        const auto to = static_cast<std::size_t>(first * kept[3] + key);
        values[to] += full.bias.values[from];
        magnitudes[to] += full.bias.magnitudes[from];
        of_row[static_cast<std::size_t>(key)] += full.bias.magnitudes[from];
      }
      for (std::int64_t key = 0; key < kept[3]; ++key) {
        squares[static_cast<std::size_t>(first * kept[3] + key)] +=
            std::pow(of_row[static_cast<std::size_t>(key)], 2);
      }
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_NEAR(found.bias.values[i], values[i], 1e-12) << broadcast;
      EXPECT_NEAR(found.bias.magnitudes[i], magnitudes[i], 1e-12) << broadcast;
      EXPECT_NEAR(found.bias_squares[i], squares[i], 1e-12) << broadcast;
    }
  }
}

// Rows past the length give the sinks the gradient of their LSE alone.
TEST(OracleGradients, GradientsOfTheOutputPastItsLengthReachNothing) {
  Random random(45);
  AttentionProblem problem = problem_of({1, 3, 4, 1, 1, 2, 2});
  problem.mask.set_query_lengths({2});
  problem.sinks = Sinks({2}, {0.5F, 1});
  const Case one(random, problem);
  const OracleGradients expected = one.gradients();
  for (std::int64_t d = 0; d < 2; ++d) {
    one.grad_output.view().at<double>({0, 2, 0, d}) = std::nan("");
  }
  const OracleGradients got = one.gradients();
  EXPECT_EQ(got.sinks.values, expected.sinks.values);
  EXPECT_EQ(got.sink_squares, expected.sink_squares);
  EXPECT_EQ(got.query.values, expected.query.values);
  EXPECT_EQ(got.key.values, expected.key.values);
  EXPECT_EQ(got.value.values, expected.value.values);
}

TEST(OracleGradients, WithoutAGradientOfTheLse) {
  Random random(45);
  const Case one(random, problem_of({1, 5, 5, 2, 1, 3, 3}));
  const auto gradients = [&](const ConstTensorView& grad_lse) {
    return oracle_gradients(one.problem, one.query.view(), one.key.view(), one.value.view(),
                            one.grad_output.view(), grad_lse, PositionRanges::all(5));
  };
  const Tensor zeros = tensor_of(DType::float32, {1, 2, 5}, std::vector<float>(10, 0.0F));
  EXPECT_EQ(gradients({}).query.values, gradients(zeros.view()).query.values);
  EXPECT_NE(gradients({}).query.values, one.gradients().query.values);
}

TEST(OracleGradients, RefusesWhatHasNone) {
  Random random(46);
  Case one(random, problem_of({1, 5, 5, 2, 1, 3, 3}));
  one.problem.normalize_output = false;
  EXPECT_THROW(static_cast<void>(one.gradients()), ArgumentError);
  one.problem.normalize_output = true;
  one.problem.weights = true;
  EXPECT_THROW(static_cast<void>(one.gradients()), ArgumentError);
  one.problem.weights = false;
  one.grad_output = random_operand(random, DType::float64, {1, 5, 2, 4});
  EXPECT_THROW(static_cast<void>(one.gradients()), InternalError);
}

}  // namespace
}  // namespace annulus::test
