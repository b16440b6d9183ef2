#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include <annulus/attention/accuracy.hpp>
#include <annulus/attention/modifiers.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/problem_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus::test {
namespace {

AttentionProblem good_problem() {
  return problem_of({2, 5, 7, 6, 3, 16, 8});
}

TEST(AttentionProblem, AcceptsWhatIsLegal) {
  EXPECT_NO_THROW(good_problem().validate());
  AttentionProblem empty = good_problem();
  empty.shape.batch = empty.shape.query_length = empty.shape.kv_length = 0;
  empty.scale = -2.5;
  EXPECT_NO_THROW(empty.validate());
  AttentionProblem largest = good_problem();
  largest.shape = {1, (std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, 4, 2, 64, 64};
  largest.scale = 3e38;
  largest.soft_cap = 3e38;
  EXPECT_NO_THROW(largest.validate());
}

TEST(AttentionProblem, RefusesNamingTheField) {
  const auto expect = [](const char* argument,
                         const std::function<void(AttentionProblem&)>& spoil) {
    AttentionProblem problem = good_problem();
    spoil(problem);
    const auto error = thrown_by<ArgumentError>([&] { problem.validate(); });
    EXPECT_EQ(error.argument(), argument);
  };
  const double infinity = std::numeric_limits<double>::infinity();
  expect("batch B", [](auto& p) { p.shape.batch = -1; });
  expect("query length T", [](auto& p) { p.shape.query_length = -1; });
  expect("key/value length S", [](auto& p) { p.shape.kv_length = -1; });
  expect("query heads N", [](auto& p) { p.shape.heads = 0; });
  expect("query heads N", [](auto& p) { p.shape.heads = 4; });
  expect("key/value heads K", [](auto& p) { p.shape.kv_heads = 0; });
  expect("head dimension D", [](auto& p) { p.shape.head_dim = 0; });
  expect("value head dimension Dv", [](auto& p) { p.shape.value_dim = 0; });
  const std::int64_t huge = std::int64_t{1} << 48;
  expect("shape", [&](auto& p) { p.shape = {huge, huge, huge, 1, 1, 1, 1}; });
  expect("shape", [&](auto& p) { p.shape = {0, huge, 1, huge, huge, 1, 1}; });
  expect("shape", [&](auto& p) { p.shape = {1, 1, huge, 4, 4, 1, 1024}; });
  expect("shape", [&](auto& p) { p.shape = {1, huge / 4, 1, 64, 64, 1, 1024}; });
  expect("shape", [&](auto& p) { p.shape = {1, std::int64_t{1} << 31, std::int64_t{1} << 31}; });
  expect("softmax dtype", [](auto& p) { p.softmax_dtype = DType::float16; });
  expect("dtype", [](auto& p) { p.dtype = DType::int32; });
  expect("scale", [&](auto& p) { p.scale = infinity; });
  expect("scale", [](auto& p) { p.scale = -1e300; });
  expect("soft cap", [](auto& p) { p.soft_cap = 0.0; });
  expect("soft cap", [&](auto& p) { p.soft_cap = std::nan(""); });
  expect("soft cap", [](auto& p) { p.soft_cap = 1e300; });
  expect("soft cap", [](auto& p) { p.soft_cap = 1e-300; });
  expect("sinks", [](auto& p) { p.sinks = Sinks({p.shape.heads + 1, 1}, {1, 2, 3, 4, 5, 6, 7}); });
  expect("dropout", [](auto& p) {
    p.shape = {1, 1, Dropout::kMaximumIndices, 1, 1, 1, 1};
    p.dropout.emplace(0.1, 1);
  });
  expect("kv_lengths", [](auto& p) { p.mask.set_kv_lengths({1}); });
  expect("normalize_output", [](auto& p) {
    p.weights = true;
    p.normalize_output = false;
  });
}

TEST(AttentionProblem, ScaleAndOperations) {
  AttentionProblem problem = good_problem();
  EXPECT_EQ(problem.logit_scale(), 0.25);
  problem.scale = 0.0;
  EXPECT_EQ(problem.logit_scale(), 0.0);
  // 2 · N · (D + Dv) for each pair.
  EXPECT_EQ(forward_flops(problem.shape, 10), 10 * 2 * 6 * (16 + 8));
  EXPECT_EQ(to_string(problem.shape), "B=2 T=5 S=7 N=6 K=3 D=16 Dv=8");
}

TEST(Accuracy, BoundsOfTheContract) {
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float32, 1 << 16).output, 8e-6);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float32, 0).output, 2e-6);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float32, 1).output, 2e-6);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float32, 64).lse, 1e-5);
  EXPECT_DOUBLE_EQ(sharded_error_factor(511), 2);
  EXPECT_DOUBLE_EQ(sharded_error_factor(512), 1.1);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float16, 64).output, 1e-3);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float64, 1 << 16).output, 4e-14);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::float64, 64).lse, 1e-5);
  AttentionProblem problem = good_problem();
  problem.dtype = DType::float64;
  problem.shape.kv_length = 16;
  EXPECT_DOUBLE_EQ(accuracy_bound(problem).output, 2e-14);
  problem.normalize_output = false;
  EXPECT_DOUBLE_EQ(accuracy_bound(problem).output, 4e-6);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::bfloat16, 64).output, 6e-3);
  EXPECT_DOUBLE_EQ(accuracy_bound(DType::bfloat16, 64).lse, 1e-5);
  EXPECT_THROW((void)accuracy_bound(DType::int32, 64), InternalError);
}

TEST(AttentionProblem, ModifiersAreNamed) {
  AttentionProblem problem = good_problem();
  problem.scale.reset();
  problem.mask.set_causal(true);
  EXPECT_EQ(modifiers_text(problem), "none");
  EXPECT_EQ(mask_and_modifiers_text(problem), "causal");
  problem.sinks = Sinks({3}, {1, 2, 3});
  EXPECT_EQ(modifiers_text(problem), "sinks [3]");
  EXPECT_EQ(mask_and_modifiers_text(problem), "causal, sinks [3]");
  problem.scale = 0.5;
  problem.soft_cap = 20;
  problem.dropout.emplace(0.25, 5);
  EXPECT_EQ(modifiers_text(problem), "scale 0.5, soft cap 20, sinks [3], dropout 0.25, seed 5");
  problem.normalize_output = false;
  EXPECT_EQ(modifiers_text(problem),
            "scale 0.5, soft cap 20, sinks [3], dropout 0.25, seed 5, unnormalised");
}

TEST(AttentionProblem, ADenseMaskIsAMask) {
  AttentionProblem problem = good_problem();
  problem.scale.reset();
  problem.soft_cap.reset();
  problem.mask = {};
  EXPECT_EQ(mask_and_modifiers_text(problem), "no mask");
  problem.softmax_dtype = DType::float64;
  EXPECT_EQ(mask_and_modifiers_text(problem), "no mask, softmax float64");
  problem.dense_mask = Extents{1, 1, 1, 1};
  EXPECT_EQ(mask_and_modifiers_text(problem), "dense mask [1, 1, 1, 1], softmax float64");
  problem.mask.set_causal(true);
  EXPECT_EQ(mask_and_modifiers_text(problem), "causal, dense mask [1, 1, 1, 1], softmax float64");
}

}  // namespace
}  // namespace annulus::test
