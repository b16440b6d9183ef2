// Every implementation on infinities, NaNs and numbers at the ends of float32's range.
#include "tests/attention/non_finite.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/attention/suite/backend.hpp"
#include "tests/attention/wide_range.hpp"

namespace annulus::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class NonFiniteForward : public BackendTest {
 protected:
  /// The largest change of a result that a hidden entry, which is not finite, may cause.
  [[nodiscard]] static float tolerance(DType dtype) {
    const std::vector<DType>& exact = backend().confines;
    return std::find(exact.begin(), exact.end(), dtype) != exact.end() ? 0 : 0.02F;
  }
};

// Infinities and NaNs reach the rows that see them, and no others.
TEST_P(NonFiniteForward, WhatIsNotFiniteReachesWhatSeesIt) {
  for (const DType dtype : backend().dtypes) {
    for (const auto& [dim, value_dim] : backend().dims) {
      const AttentionProblem any = test::problem_of({1, 8, 8, 1, 1, dim, value_dim}, dtype);
      for (std::size_t k = 0; k < kernels(any).size(); ++k) {
        const auto by_kernel = [this, k](const WholeAttention& whole) {
          return run(*kernels(whole.problem)[k], whole.block());
        };
        expect_non_finite_confined(dtype, by_kernel, backend().blocks != Blocks::never,
                                   tolerance(dtype), dim, value_dim);
        const std::int64_t both = std::max<std::int64_t>(dim, 8);
        expect_nan_without_weight_shown(dtype, both, by_kernel);
        expect_weightless_shown(by_kernel(weightless_attention(dtype, both)));
      }
    }
  }
}

TEST_P(NonFiniteForward, AKernelForgetsWhatWasNotFinite) {
  Random random(63);
  for (std::size_t i = 0; i < 12; ++i) {
    AttentionProblem problem = problem_of(i, 70, 300);
    problem.mask.set_causal(true);
    add_blocks(random, problem);
    const WholeAttention whole = random_attention(random, problem);
    const WholeAttention bad = with_non_finite(whole, {true, std::nanf(""), {60, 65}});
    for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
      const Result clean = run(*kernel, whole.block());
      static_cast<void>(run(*kernel, bad.block()));
      EXPECT_TRUE(run(*kernel, whole.block()) == clean) << describe(problem);
    }
  }
}

// Rows 0 to 9 are hidden by the mask, 10 to 19 by the bias, 20 to 29 by both together.
TEST_P(NonFiniteForward, RowsWhoseScoresHideEverythingAreEmpty) {
  Random random(64);
  for (std::size_t i = 0; i < 4; ++i) {
    AttentionProblem problem = problem_of(i, 40, 700);
    problem.bias = Extents{1, 4, 40, 700};
    problem.dense_mask = Extents{1, 1, 40, 700};
    add_blocks(random, problem);
    ASSERT_TRUE(choose_dtype(problem, i));
    const WholeAttention whole = random_attention(random, problem);
    for (std::int64_t j = 0; j < 700; ++j) {
      for (std::int64_t t = 0; t < 10; ++t) {
        whole.mask.view().at<std::uint8_t>({0, 0, t, j}) = 0;
        for (std::int64_t n = 0; n < 4; ++n) {
          whole.bias.view().at<float>({0, n, 10 + t, j}) = -kInfinity;
          if (j % 3 == 0) whole.bias.view().at<float>({0, n, 20 + t, j}) = -kInfinity;
        }
        whole.mask.view().at<std::uint8_t>({0, 0, 20 + t, j}) = j % 3 == 0 ? 1 : 0;
      }
    }
    expect_accurate(whole);
  }
}

// Keys and values hidden by a dense mask or a bias of −∞ may hold anything.
TEST_P(NonFiniteForward, ScoresHideWhatIsNotFinite) {
  Random random(65);
  std::size_t i = 0;
  for (const bool by_bias : {false, true}) {
    for (int variant = 0; variant < 6; ++variant) {
      AttentionProblem problem = problem_of(i++, 60, 600);
      (by_bias ? problem.bias : problem.dense_mask) = Extents{1, 1, 60, 600};
      if (variant % 2 == 1) problem.dropout.emplace(0.3, 2);
      ASSERT_TRUE(choose_dtype(problem, i));
      if (backend().blocks == Blocks::always) {
        problem.mask.set_block_mask(BlockMask::random(60, 600, 4, 1.0, 1));
      }
      const WholeAttention whole = random_attention(random, problem);
      for (std::int64_t t = 0; t < 60; ++t) {  // the even rows do not see key 300
        if (by_bias && t % 2 == 0) whole.bias.view().at<float>({0, 0, t, 300}) = -kInfinity;
        if (!by_bias) whole.mask.view().at<std::uint8_t>({0, 0, t, 300}) = t % 2 == 0 ? 0 : 1;
      }
      const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
      const Result clean = run(*kernel, whole.block());
      for (const bool in_keys : {false, true}) {
        const WholeAttention bad = with_non_finite(whole, {in_keys, std::nanf(""), {300}});
        AttentionBlock block = bad.block();
        block.scores = whole.scores();
        const Result spoilt = run(*kernel, block);
        for (std::int64_t t = 0; t < 60; ++t) {
          const auto got = spoilt.output.view().at<float>({1, t, 1, NonFinite::kDim});
          if (t % 2 == 0) {
            ASSERT_NEAR(got, clean.output.view().at<float>({1, t, 1, NonFinite::kDim}),
                        tolerance(problem.dtype))
                << describe(problem) << " row " << t;
          } else {
            // Dropping a pair does not hide a NaN: 0 · NaN is NaN.
            ASSERT_TRUE(std::isnan(got)) << describe(problem) << " row " << t;
          }
        }
      }
    }
  }
}

TEST_P(NonFiniteForward, WhatIsNotFiniteInABiasComesOutOfItsRow) {
  Random random(66);
  std::size_t i = 0;
  for (const float seen : {kInfinity, std::nanf("")}) {
    AttentionProblem problem = problem_of(i, 20, 600);
    problem.bias = Extents{1, 4, 20, 600};
    ASSERT_TRUE(choose_dtype(problem, i++));
    const WholeAttention whole = random_attention(random, problem);
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    const Result clean = run(*kernel, whole.block());
    whole.bias.view().at<float>({0, 1, 7, 555}) = seen;
    const Result spoilt = run(*kernel, whole.block());
    for (std::int64_t t = 0; t < 20; ++t) {
      for (std::int64_t n = 0; n < 4; ++n) {
        const float got = spoilt.output.view().at<float>({0, t, n, 2});
        if (t == 7 && n == 1) {
          EXPECT_TRUE(std::isnan(got)) << describe(problem);
        } else {
          EXPECT_NEAR(got, clean.output.view().at<float>({0, t, n, 2}), tolerance(problem.dtype));
        }
      }
    }
  }
}

TEST_P(NonFiniteForward, IsRightAtTheEndsOfTheRange) {
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    for (const auto& [dim, value_dim] : backend().dims) {
      const WholeAttention whole =
          widest_attention(dtype, dim, dtype == DType::bfloat16 ? backend().largest_logit : 1e38);
      for (const std::unique_ptr<Kernel>& kernel : kernels(whole.problem)) {
        expect_right_at_the_ends_of_the_range(whole, run(*kernel, whole.block()));
      }
    }
  }
}

TEST_P(NonFiniteForward, TheLargestLogitOfARowOfNansIsNan) {
  if (!hands_over_maxima()) GTEST_SKIP() << backend().name << " knows no largest logit";
  const AttentionProblem problem = test::problem_of({1, 1, 3, 1, 1, 1, 1});
  for (const std::size_t at : {0U, 1U, 2U}) {
    for (const float bad : {std::nanf(""), kInfinity}) {
      std::vector<float> keys{1, 4, 2};
      keys[at] = bad;
      const WholeAttention whole = attention_of(problem, {1}, keys, {1, 2, 3});
      EXPECT_TRUE(std::isnan(whole.oracle().maximum[0]));
      EXPECT_TRUE(std::isnan(whole.oracle().sum[0]));
      for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
        const Tensor maximum = tensor_of(DType::float32, {1, 1, 1}, {0});
        static_cast<void>(result_on(*device_, *stream_, *kernel, DType::float32, whole.block(),
                                    DType::float32, &maximum));
        EXPECT_TRUE(std::isnan(*maximum.view().as<float>())) << at;
      }
    }
  }
}

TEST_P(NonFiniteForward, ProductsBeyondFloat32ShowAsNan) {
  AttentionProblem problem = test::problem_of({1, 1, 3, 1, 1, 8, 8});
  const auto first_of = [](const std::vector<float>& entries) {
    std::vector<float> values(8 * entries.size(), 0.0F);
    for (std::size_t i = 0; i < entries.size(); ++i) values[8 * i] = entries[i];
    return values;
  };
  if (backend().blocks == Blocks::always) {
    problem.mask.set_block_mask(BlockMask::random(1, 3, 1, 1.0, 1));
  }
  const WholeAttention whole =
      attention_of(problem, first_of({1e30F}), first_of({-1e30F, 1e30F, 1}), first_of({1, 2, 3}));
  for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
    const Result result = run(*kernel, whole.block());
    EXPECT_TRUE(std::isnan(*result.output.view().as<float>()));
    EXPECT_TRUE(std::isnan(*result.lse.view().as<float>()));
  }
}

// Later launches continue from the results of earlier ones.
TEST_P(NonFiniteForward, RowsOfNoWeightInManyRanges) {
  const WholeAttention whole = weightless_attention(DType::float32, 64);
  AttentionBlock block = whole.block();
  block.columns = tens(600);
  for (const std::unique_ptr<Kernel>& kernel : kernels(whole.problem)) {
    expect_weightless_shown(run(*kernel, block));
  }
}

INSTANTIATE_TEST_SUITE_P(Suite, NonFiniteForward, ::testing::ValuesIn(backends()), name_of_backend);

}  // namespace
}  // namespace annulus::test
