// Dense attention against the oracle, and its weights against their definition.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <malloc.h>
#include <new>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/attention/oracle.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/support/message_of.hpp"

// Counts the memory of operator new, over all threads.
namespace {

std::atomic<std::size_t> in_use{0};
std::atomic<std::size_t> most_in_use{0};

std::size_t restart_peak() {
  most_in_use = in_use.load();
  return in_use;
}
std::size_t peak() {
  return most_in_use;
}

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  const std::size_t now = in_use += ::malloc_usable_size(memory);
  std::size_t most = most_in_use;
  while (most < now && !most_in_use.compare_exchange_weak(most, now)) {
  }
  return memory;
}
void operator delete(void* memory) noexcept {
  in_use -= ::malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
  operator delete(memory);
}

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const Implementation& vanilla() {
  static const Registry registry = Registry::standard();
  return registry.get("vanilla");
}

Result run_vanilla(const AttentionProblem& problem, const AttentionBlock& block, int threads = 1) {
  Result result(block, DType::float64);
  forward_on_cpu(vanilla(), problem, block, result.state(), threads);
  return result;
}

// float64 tensors whose values no narrower dtype has.
Tensor wide_tensor(Random& random, const Extents& shape) {
  Tensor tensor(DType::float64, shape, test_memory());
  const Tensor narrow = random_tensor(random, DType::float32, shape);
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    tensor.view().as<double>()[i] = narrow.view().as<float>()[i] / 3.0;
  }
  return tensor;
}

AttentionProblem default_problem() {
  AttentionProblem problem = causal_problem_of({2, 13, 29, 6, 3, 8, 5}, DType::float32, 16);
  problem.mask.set_window(20, -1);
  problem.mask.set_kv_lengths({29, 7});
  problem.soft_cap = 3.0;
  problem.scale = 0.7;
  problem.dropout.emplace(0.3, 5);
  return problem;
}

TEST(Vanilla, AFloat64SoftmaxIsComputedInFloat64) {
  Random random(2);
  AttentionProblem problem = default_problem();
  const WholeAttention whole = random_attention(random, problem);
  const auto lse_error = [&](DType softmax) {
    problem.softmax_dtype = softmax;
    const OracleOutput truth = whole.oracle();
    const Result result = run_vanilla(problem, whole.block());
    double worst = 0;
    for (std::size_t i = 0; i < truth.lse.size(); ++i) {
      const double lse = result.lse.view().as<double>()[i];
      if (lse != truth.lse[i]) worst = std::max(worst, std::abs(lse - truth.lse[i]));
    }
    return worst;
  };
  EXPECT_GT(lse_error(DType::float32), 1e-10);
  EXPECT_LT(lse_error(DType::float64), 1e-13);
}

TEST(Vanilla, Float64TensorsGiveFloat64Outputs) {
  Random random(3);
  AttentionProblem problem = default_problem();
  problem.dtype = DType::float64;
  const AttentionShape& s = problem.shape;
  const WholeAttention whole{problem,
                             wide_tensor(random, {s.batch, s.query_length, s.heads, s.head_dim}),
                             wide_tensor(random, {s.batch, s.kv_length, s.kv_heads, s.head_dim}),
                             wide_tensor(random, {s.batch, s.kv_length, s.kv_heads, s.value_dim})};
  const Tensor output(DType::float64, {s.batch, s.query_length, s.heads, s.value_dim},
                      test_memory());
  const Tensor lse(DType::float64, {s.batch, s.heads, s.query_length}, test_memory());
  forward_on_cpu(vanilla(), problem, whole.block(), {output.view(), lse.view()});
  const OracleOutput truth = whole.oracle();
  for (std::size_t i = 0; i < truth.output.size(); ++i) {
    ASSERT_NEAR(output.view().as<double>()[i], truth.output[i], 1e-14) << i;
  }
}

TEST(Vanilla, RefusesWhatTakesMoreThanTheStatedMemory) {
  AttentionProblem problem = problem_of({1, 16384, 16384, 1, 1, 8, 8});
  const auto reason = [&](std::int64_t rows) {
    return vanilla()
        .takes(problem, {PositionRanges::all(rows), PositionRanges::all(16384), 0, 1, false})
        .reason();
  };
  // Logits, a byte each that says whether they are visible, and queries, keys, values and outputs:
  // 16384 t (4 + 1) + (16384 + t) (8 + 8) 4 bytes.
  EXPECT_EQ(reason(13084), "");
  EXPECT_THAT(reason(13085), AllOf(HasSubstr("13085 queries"), HasSubstr("1024 MiB")));
  problem.softmax_dtype = DType::float64;
  EXPECT_EQ(reason(7261), "");
  EXPECT_THAT(reason(7262), HasSubstr("1024 MiB"));
}

TEST(Vanilla, IsChosenOnlyForWhatOthersLack) {
  const Registry registry = Registry::standard();
  AttentionProblem problem;
  const auto chosen = [&] {
    return registry.select("auto", problem, Place::host()).candidates.front()->names().front();
  };
  EXPECT_EQ(chosen(), "native");
  problem.weights = true;
  EXPECT_EQ(chosen(), "vanilla");
  problem.weights = false;
  problem.softmax_dtype = DType::float64;
  EXPECT_EQ(chosen(), "vanilla");
  problem.softmax_dtype = DType::float32;
  problem.dtype = DType::float64;
  EXPECT_EQ(chosen(), "vanilla");
  EXPECT_THAT(vanilla().capability(problem, Place::cuda(0)).reason(), HasSubstr("CPUs only"));
  problem = {};
  problem.weights = true;
  for (const char* name : {"native", "sdpa", "flash_attn2", "blocksparse"}) {
    EXPECT_THAT(registry.get(name).capability(problem, Place::host()).reason(),
                HasSubstr("a request for attention weights"));
  }
}

// Weights [b,n,t,s] times values give the output; a weight is 0 only for hidden or dropped pairs.
TEST(AttentionWeights, TimesValuesAreTheOutput) {
  Random random(7);
  AttentionProblem problem = default_problem();
  problem.sinks = Sinks({2}, {0.5F, -1.0F});
  problem.bias = Extents{2, 1, 13, 29};
  problem.dense_mask = Extents{1, 6, 13, 29};
  problem.softmax_dtype = DType::float64;
  const WholeAttention whole = random_attention(random, problem);
  const AttentionShape& s = problem.shape;
  const Tensor weights(DType::float64, {s.batch, s.heads, s.query_length, s.kv_length},
                       test_memory());
  attention_weights(problem, whole.block(), weights.view(), 2);
  const OracleOutput truth = whole.oracle();
  for_each_of<3>({s.batch, s.heads, s.query_length}, [&](auto b, auto n, auto t) {
    std::vector<double> sum(static_cast<std::size_t>(s.value_dim), 0.0);
    for (std::int64_t j = 0; j < s.kv_length; ++j) {
      const double weight = weights.view().at<double>({b, n, t, j});
      const bool visible = problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(j)) &&
                           whole.scores().shows(b, n, t, j) &&
                           !problem.dropout->drops(b, n, GlobalPosition(t), GlobalPosition(j));
      ASSERT_EQ(weight != 0, visible);
      for (std::int64_t d = 0; d < s.value_dim; ++d) {
        sum[static_cast<std::size_t>(d)] +=
            weight * whole.value.view().at<float>({b, j, n / s.heads_per_kv_head(), d});
      }
    }
    for (std::int64_t d = 0; d < s.value_dim; ++d) {
      ASSERT_NEAR(sum[static_cast<std::size_t>(d)],
                  truth.output[static_cast<std::size_t>(
                      ((b * s.query_length + t) * s.heads + n) * s.value_dim + d)],
                  1e-13);
    }
  });
}

// Counts the matrices too, as they are vectors.
TEST(AttentionWeights, TakeLittleMemoryBesideTheResult) {
  constexpr int kThreads = 2;
  constexpr std::size_t kPerThread = std::size_t{11} << 20;
  Random random(9);
  const AttentionProblem problem = problem_of({1, 3000, 4000, 2, 2, 1, 1});
  const WholeAttention whole = random_attention(random, problem);
  const Tensor weights(DType::float32, {1, 2, 3000, 4000}, test_memory());  // 46 MiB per head
  const std::size_t before = restart_peak();
  attention_weights(problem, whole.block(), weights.view(), kThreads);
  EXPECT_LT(peak() - before, kThreads * kPerThread);
  EXPECT_GT(peak() - before, kPerThread / 2) << "nothing was counted";
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t t = 0; t < 3000; ++t) {
      double sum = 0;
      for (std::int64_t j = 0; j < 4000; ++j) sum += weights.view().at<float>({0, n, t, j});
      ASSERT_NEAR(sum, 1, 1e-4) << "head " << n << " row " << t;
    }
  }
}

TEST(AttentionWeights, OfARowThatSeesNothingAreZero) {
  Random random(8);
  AttentionProblem problem = problem_of({1, 3, 5, 1, 1, 4, 4});
  problem.mask.set_query_lengths({1});
  const WholeAttention whole = random_attention(random, problem);
  const Tensor weights(DType::float32, {1, 1, 3, 5}, test_memory());
  std::memset(weights.view().data(), 0xff, weights.bytes());
  attention_weights(problem, whole.block(), weights.view(), 1);
  double sum = 0;
  for (std::int64_t j = 0; j < 5; ++j) sum += weights.view().at<float>({0, 0, 0, j});
  EXPECT_NEAR(sum, 1, 1e-6);
  for (std::int64_t i = 5; i < 15; ++i) EXPECT_EQ(weights.view().as<float>()[i], 0);
}

TEST(AttentionWeights, OtherShapesAndDtypesAreRefused) {
  Random random(9);
  AttentionProblem problem = problem_of({1, 3, 5, 1, 1, 4, 4});
  const WholeAttention whole = random_attention(random, problem);
  const auto message = [&](DType dtype, const Extents& shape) {
    const Tensor weights(dtype, shape, test_memory());
    return message_of<ArgumentError>(
        [&] { attention_weights(problem, whole.block(), weights.view(), 1); });
  };
  EXPECT_THAT(message(DType::float32, {1, 1, 5, 3}), HasSubstr("[1, 1, 3, 5]"));
  EXPECT_THAT(message(DType::float64, {1, 1, 3, 5}), HasSubstr("float32"));
}

TEST(Vanilla, NanBeforeMinusInfinityShows) {
  expect_nan_before_weightless_shown(DType::float32, [](const WholeAttention& whole) {
    return run_vanilla(whole.problem, whole.block());
  });
}

TEST(VanillaGradients, Declares) {
  AttentionProblem problem = problem_of({1, 9, 9, 2, 1, 4, 4});
  const Place host = Place::host();
  EXPECT_TRUE(vanilla().fits_backward(problem, host));
  problem.dtype = DType::float64;
  EXPECT_TRUE(vanilla().fits_backward(problem, host));
  problem.normalize_output = false;
  EXPECT_FALSE(vanilla().fits_backward(problem, host));
  EXPECT_TRUE(vanilla().fits(problem, host));
  problem.normalize_output = true;
  problem.weights = true;
  EXPECT_FALSE(vanilla().fits_backward(problem, host));
}

}  // namespace
}  // namespace annulus::test
