// Every matrix path that this CPU supports, and the choice of the fastest.
#include <fstream>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "native/native.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/native_run.hpp"
#include "tests/attention/non_finite.hpp"

namespace annulus::test {
namespace {

std::vector<MatrixPath> paths_of(DType dtype) {
  std::vector<MatrixPath> paths{MatrixPath::sgemm};
  if (best_matrix_path(dtype) != MatrixPath::sgemm) paths.push_back(best_matrix_path(dtype));
  return paths;
}

Result run_path(MatrixPath path, const AttentionProblem& problem, const AttentionBlock& block,
                int threads = 1) {
  Result result(block);
  Cpu cpu;
  make_native_kernel(problem, path, cpu.device.memory())
      ->forward(block, result.state(), cpu.context(threads));
  return result;
}

constexpr std::array kTypes{DType::bfloat16, DType::float16, DType::float32};

// If a build or the run-time check loses AMX, this test must fail rather than look slow.
TEST(NativePaths, AmxIsTakenWhereTheCpuHasIt) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) {
  }
  const bool amx = line.find(" amx_bf16") != std::string::npos &&
                   line.find(" amx_tile") != std::string::npos &&
                   line.find(" avx512bw") != std::string::npos;
  for (const DType dtype : kTypes) {
    EXPECT_EQ(best_matrix_path(dtype), amx ? MatrixPath::amx : MatrixPath::sgemm);
  }
  if (!amx) GTEST_SKIP() << "this CPU has no AMX: nothing to tell apart";
  // AMX rounds differently from float32 products, so the bits tell which path was taken.
  Random random(51);
  for (const DType dtype : kTypes) {
    const AttentionProblem problem = problem_of({1, 300, 600, 2, 1, 64, 64}, dtype);
    const WholeAttention whole = random_attention(random, problem);
    const Result taken = run_native(problem, whole.block());
    EXPECT_TRUE(taken == run_path(MatrixPath::amx, problem, whole.block()));
    EXPECT_FALSE(taken == run_path(MatrixPath::sgemm, problem, whole.block()));
  }
}

// Logits far below the cap stay what they are, and those far above become it.
TEST(NativePaths, ExtremeSoftCaps) {
  Random random(59);
  for (const DType dtype : kTypes) {
    for (const double cap : {1.2e-38, 1e-3, 50.0, 51.0, 1000.0, 1e10, 1e30, 3e38}) {
      AttentionProblem problem = problem_of({1, 20, 300, 2, 1, 32, 32}, dtype);
      problem.scale = 40;
      problem.soft_cap = cap;
      problem.mask.set_causal(true);
      problem.mask.set_offset(40);
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      for (const MatrixPath path : paths_of(dtype)) {
        const Error error = error_of(run_path(path, problem, whole.block()), dtype, truth);
        EXPECT_LE(error.output, accuracy_bound(dtype, 300).output) << name_of(dtype) << cap;
        EXPECT_LE(error.lse, dtype == DType::float32 ? 1e-3 : 2e-3) << name_of(dtype) << cap;
      }
    }
  }
}

// Values that a sum of three bfloat16 values cannot hold, visible and hidden.
TEST(NativePaths, HugeAndTinyValuesKeepTheirDigits) {
  Random random(59);
  for (const float what : {3.4e38F, -3.4e38F, 1e-32F, 1e-35F}) {
    AttentionProblem problem = causal_problem_of({1, 100, 600, 1, 1, 8, 8}, DType::float32, 300);
    const WholeAttention whole = random_attention(random, problem);
    // Alone in their dimension, so that larger terms do not mask an error.
    for (std::int64_t i = 0; i < 600; ++i) {
      whole.value.view().at<float>({0, i, 0, 2}) = i == 350 ? what : 0.0F;
      whole.key.view().at<float>({0, i, 0, 5}) = i == 351 ? what : 0.0F;
    }
    for (std::int64_t t = 0; t < 100; ++t) {
      whole.query.view().at<float>({0, t, 0, 5}) = 1 / what;
    }
    const OracleOutput truth = whole.oracle();
    for (const MatrixPath path : paths_of(DType::float32)) {
      const Result result = run_path(path, problem, whole.block());
      for (std::int64_t t = 0; t < 100; ++t) {
        for (std::int64_t d = 0; d < 8; ++d) {
          const double expected = truth.output[static_cast<std::size_t>(8 * t + d)];
          const float got = result.output.view().at<float>({0, t, 0, d});
          const double scale = d == 2 ? std::abs(expected) : 1;
          EXPECT_LE(std::abs(got - expected), 1e-5 * scale) << what << " " << t << " " << d;
        }
      }
    }
  }
}

TEST(NativePaths, NanBeforeMinusInfinityShows) {
  for (const DType dtype : kTypes) {
    for (const MatrixPath path : paths_of(dtype)) {
      expect_nan_before_weightless_shown(dtype, [path](const WholeAttention& whole) {
        return run_path(path, whole.problem, whole.block());
      });
    }
  }
}

// Nothing is hidden: the rows see every key.
TEST(NativePaths, VisibleNonFiniteEntriesShow) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Random random(56);
  for (const DType dtype : kTypes) {
    const WholeAttention whole =
        random_attention(random, problem_of({1, 40, 600, 2, 2, 8, 8}, dtype));
    for (const MatrixPath path : paths_of(dtype)) {
      const Result clean = run_path(path, whole.problem, whole.block());
      for (const float value : {kInfinity, -kInfinity}) {
        const NonFinite entries{.value = value, .positions = {0, 599}};
        const Result bad = run_path(path, whole.problem, with_non_finite(whole, entries).block());
        for (std::int64_t t = 0; t < 40; ++t) {
          for (std::int64_t d = 0; d < 8; ++d) {
            EXPECT_EQ(bad.output.view().at<float>({0, t, 0, d}),
                      d == NonFinite::kDim ? value : clean.output.view().at<float>({0, t, 0, d}));
          }
        }
      }
      // An infinite query gives logits of +∞ and −∞, and a row of NaN.
      const Tensor query(dtype, whole.query.shape(), test_memory());
      copy(whole.query.view(), query.view());
      from_float32(&kInfinity, dtype, query.view().address({0, 7, 1, 3}), 1);
      AttentionBlock block = whole.block();
      block.query = query.view();
      const Result bad = run_path(path, whole.problem, block);
      for (std::int64_t t = 0; t < 40; ++t) {
        EXPECT_EQ(bad.output.view().at<float>({0, t, 0, 0}),
                  clean.output.view().at<float>({0, t, 0, 0}));
        EXPECT_EQ(std::isnan(bad.output.view().at<float>({0, t, 1, 0})), t == 7);
        EXPECT_EQ(std::isnan(bad.lse.view().at<float>({0, 1, t})), t == 7);
      }
    }
  }
}

TEST(NativePaths, ThreadsAndRepetitionChangeNoBit) {
  Random random(57);
  for (const DType dtype : kTypes) {
    AttentionProblem problem = causal_problem_of({2, 600, 1100, 4, 2, 64, 32}, dtype, 500);
    const WholeAttention whole = random_attention(random, problem);
    for (const MatrixPath path : paths_of(dtype)) {
      const Result one = run_path(path, problem, whole.block());
      for (const int threads : {1, 2, 5, 64}) {
        EXPECT_TRUE(one == run_path(path, problem, whole.block(), threads));
      }
    }
  }
}

void expect_right_gradients(WholeGradients& whole) {
  const AttentionProblem& problem = whole.forward.problem;
  for (const MatrixPath path : paths_of(problem.dtype)) {
    SCOPED_TRACE(describe(problem) + " path " + std::to_string(static_cast<int>(path)));
    for (Tensor* const gradient : {&whole.query, &whole.key, &whole.value}) {
      *gradient = zeros(DType::float32, gradient->shape());
    }
    Cpu cpu;
    make_native_kernel(problem, path, cpu.device.memory())
        ->backward(whole.block(), whole.gradients(), cpu.context(2));
    EXPECT_LT(whole.largest_share(), 0.5);
  }
}

TEST(NativePaths, GradientsOfEveryDtypeAndManyDimensions) {
  Random random(31);
  for (const DType dtype : kTypes) {
    for (const auto& [dim, value_dim] : {std::pair{5, 6}, {64, 64}, {80, 33}, {128, 96}}) {
      AttentionProblem problem = causal_problem_of({2, 70, 301, 6, 2, dim, value_dim}, dtype, 231);
      problem.mask.set_window(150, 0);
      WholeGradients whole(random, problem);
      expect_right_gradients(whole);
    }
  }
}

// Parts in bfloat16 cannot hold them: tiles of such entries are multiplied in float32.
TEST(NativePaths, GradientsOfTinyOutputGradients) {
  Random random(32);
  WholeAttention operands =
      random_operands(random, problem_of({1, 40, 90, 2, 1, 16, 16}, DType::float32));
  WholeGradients whole(random, std::move(operands), 1e-31F);
  expect_right_gradients(whole);
}

}  // namespace
}  // namespace annulus::test
