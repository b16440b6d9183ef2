// Every matrix path that this CPU supports, and the choice of the fastest.
#include <fstream>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "native/native.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/native_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/wide_range.hpp"

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
  HostDevice device;
  HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
  make_native_kernel(problem, path, device.memory())
      ->forward(block, result.state(), {stream, nullptr, threads});
  return result;
}

constexpr std::array kTypes{DType::bfloat16, DType::float16, DType::float32};

void expect_accurate_on_every_path(Random& random, const AttentionProblem& problem) {
  problem.validate();
  const WholeAttention whole = random_attention(random, problem);
  const OracleOutput truth = whole.oracle();
  for (const MatrixPath path : paths_of(problem.dtype)) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask) + " path " + std::to_string(static_cast<int>(path)));
    expect_accurate(run_path(path, problem, whole.block()), whole, truth);
  }
}

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

TEST(NativePaths, EveryMaskAloneAndInPairs) {
  Random random(52);
  int i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    // Several tiles of rows and columns, and strips that begin in the middle of a register.
    AttentionProblem problem =
        problem_of({2, 301, 1093, 6, 2, 16, 8}, kTypes[static_cast<std::size_t>(i++ % 3)]);
    problem.mask = random_mask(random, kinds, 2, 301, 1093);
    expect_accurate_on_every_path(random, problem);
  }
}

TEST(NativePaths, HeadsDimensionsAndOddSizes) {
  Random random(53);
  for (const DType dtype : kTypes) {
    for (const std::int64_t dim : {1, 3, 31, 32, 33, 64, 80, 128, 200}) {
      for (const std::int64_t value_dim : {dim, std::int64_t{1}, std::int64_t{48}}) {
        expect_accurate_on_every_path(random, problem_of({1, 33, 65, 2, 1, dim, value_dim}, dtype));
      }
    }
    for (const std::int64_t rows : {0, 1, 15, 16, 17, 33, 257}) {
      for (const std::int64_t columns : {0, 1, 16, 31, 32, 33, 511, 513}) {
        expect_accurate_on_every_path(random, problem_of({1, rows, columns, 3, 3, 32, 32}, dtype));
      }
    }
    expect_accurate_on_every_path(random, problem_of({0, 4, 4, 2, 2, 5, 3}, dtype));
    for (const std::int64_t heads : {7, 40, 300}) {
      AttentionProblem problem = problem_of({1, 19, 70, heads, 1, 32, 16}, dtype);
      problem.mask.set_causal(true);
      problem.mask.set_offset(51);
      expect_accurate_on_every_path(random, problem);
    }
  }
}

TEST(NativePaths, ScalesCapsAndDropout) {
  Random random(54);
  for (const DType dtype : kTypes) {
    for (const double scale : {-0.3, 0.0, 0.125, 0.5}) {
      for (const double cap : {0.0, 0.5, 2.0, 30.0}) {
        for (const double dropout : {0.0, 0.3}) {
          AttentionProblem problem = problem_of({2, 40, 600, 2, 1, 32, 32}, dtype);
          problem.scale = scale;
          if (cap > 0) problem.soft_cap = cap;
          problem.dropout.emplace(dropout, 9);
          problem.mask.set_window(50, 400);
          SCOPED_TRACE("scale " + std::to_string(scale) + " cap " + std::to_string(cap));
          expect_accurate_on_every_path(random, problem);
        }
      }
    }
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

// Sums over many tiles must not lose digits.
TEST(NativePaths, LongSequencesStayAccurate) {
  Random random(58);
  for (const DType dtype : kTypes) {
    const AttentionProblem problem = problem_of({1, 8, 30000, 1, 1, 128, 128}, dtype);
    const WholeAttention whole = random_attention(random, problem);
    const OracleOutput truth = whole.oracle();
    for (const MatrixPath path : paths_of(dtype)) {
      const Result result = run_path(path, problem, whole.block());
      expect_accurate(result, whole, truth);
      const Error error = error_of(result, dtype, truth);
      RecordProperty(std::string(name_of(dtype)) + std::to_string(static_cast<int>(path)),
                     fmt::format("{:.2e} {:.2e}", error.output, error.lse));
    }
  }
}

// Values that a sum of three bfloat16 values cannot hold, visible and hidden.
TEST(NativePaths, HugeAndTinyValuesKeepTheirDigits) {
  Random random(59);
  for (const float what : {3.4e38F, -3.4e38F, 1e-32F, 1e-35F}) {
    AttentionProblem problem = problem_of({1, 100, 600, 1, 1, 8, 8}, DType::float32);
    problem.mask.set_causal(true);
    problem.mask.set_offset(300);
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

// Tensors stored head by head, or with padded strides.
TEST(NativePaths, Strides) {
  Random random(55);
  for (const DType dtype : kTypes) {
    AttentionProblem problem = problem_of({2, 100, 700, 4, 2, 64, 32}, dtype);
    problem.mask.set_causal(true);
    problem.mask.set_offset(600);
    const WholeAttention whole = random_attention(random, problem);
    const Tensor query = gather(whole.query.view(), whole.rows());
    const Tensor key = gather(whole.key.view(), whole.columns());
    const Tensor value = gather(whole.value.view(), whole.columns());
    AttentionBlock block = whole.block();
    block.query = as_bthd(query);
    block.key = as_bthd(key);
    block.value = as_bthd(value);
    for (const MatrixPath path : paths_of(dtype)) {
      EXPECT_TRUE(run_path(path, problem, block) == run_path(path, problem, whole.block()));
    }
  }
}

TEST(NativePaths, NonFiniteEntriesReachTheRowsThatSeeThemAndNoOthers) {
  for (const DType dtype : kTypes) {
    for (const MatrixPath path : paths_of(dtype)) {
      expect_non_finite_confined(dtype, [path](const WholeAttention& whole) {
        return run_path(path, whole.problem, whole.block(), 2);
      });
      const auto run = [path](const WholeAttention& whole) {
        return run_path(path, whole.problem, whole.block());
      };
      expect_nan_without_weight_shown(dtype, 64, run);
      expect_nan_before_weightless_shown(dtype, run);
    }
  }
}

TEST(NativePaths, AreRightAtTheEndsOfTheRange) {
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    const WholeAttention whole = widest_attention(dtype, 64);
    for (const MatrixPath path : paths_of(dtype)) {
      expect_right_at_the_ends_of_the_range(whole, run_path(path, whole.problem, whole.block()));
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

// A logit of −∞ stays −∞, also where a product of parts would be NaN.
TEST(NativePaths, InfiniteKeysHaveNoWeight) {
  for (const DType dtype : kTypes) {
    for (const MatrixPath path : paths_of(dtype)) {
      const WholeAttention whole = weightless_attention(dtype);
      expect_weightless_shown(run_path(path, whole.problem, whole.block()));
    }
  }
}

TEST(NativePaths, ThreadsAndRepetitionChangeNoBit) {
  Random random(57);
  for (const DType dtype : kTypes) {
    AttentionProblem problem = problem_of({2, 600, 1100, 4, 2, 64, 32}, dtype);
    problem.mask.set_causal(true);
    problem.mask.set_offset(500);
    const WholeAttention whole = random_attention(random, problem);
    for (const MatrixPath path : paths_of(dtype)) {
      const Result one = run_path(path, problem, whole.block());
      for (const int threads : {1, 2, 5}) {
        EXPECT_TRUE(one == run_path(path, problem, whole.block(), threads));
      }
    }
  }
}

void expect_right_gradients(WholeGradients& whole) {
  const AttentionProblem& problem = whole.forward.problem;
  for (const MatrixPath path : paths_of(problem.dtype)) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " path " +
                 std::to_string(static_cast<int>(path)));
    for (Tensor* const gradient : {&whole.query, &whole.key, &whole.value}) {
      *gradient = zeros(DType::float32, gradient->shape());
    }
    HostDevice device;
    HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
    make_native_kernel(problem, path, device.memory())
        ->backward(whole.block(), whole.gradients(), {stream, nullptr, 2});
    EXPECT_LT(whole.largest_share(), 0.5);
  }
}

TEST(NativePaths, GradientsOfEveryDtypeAndManyDimensions) {
  Random random(31);
  for (const DType dtype : kTypes) {
    for (const auto& [dim, value_dim] : {std::pair{5, 6}, {64, 64}, {80, 33}, {128, 96}}) {
      AttentionProblem problem = problem_of({2, 70, 301, 6, 2, dim, value_dim}, dtype);
      problem.mask.set_causal(true);
      problem.mask.set_offset(231);
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
