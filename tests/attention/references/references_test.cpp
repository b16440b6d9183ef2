// The oracle against the results of JAX and ejkernel for the same inputs. Kernels are compared in
// tests/ring/references_test.cpp.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/problem.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/random_tensor.hpp"
#include "tests/attention/references/comparison.hpp"
#include "tests/attention/references/reference_case.hpp"

namespace annulus::test {
namespace {

PositionRanges rows_of(const ReferenceCase& reference) {
  return PositionRanges::all(reference.problem.shape.query_length);
}

OracleOutput oracle(const ReferenceCase& reference, const AttentionProblem& problem) {
  return oracle_attention(problem, reference.query.view(), reference.key.view(),
                          reference.value.view(), rows_of(reference), 0, 0, 0,
                          reference.scores(problem));
}

class References : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] const AttentionProblem& problem() const { return reference_.computed(); }
  const ReferenceCase reference_ = read_reference(GetParam());
  const OracleOutput expected_ = expected_of(reference_);
};

TEST_P(References, OracleAgrees) {
  expect_agrees(oracle(reference_, problem()), expected_, reference_);
}

TEST_P(References, DifferencesAreAsDocumented) {
  if (reference_.differs_in_empty_rows) expect_documented_empty_rows(reference_);
  if (reference_.lse_dtype != DType::float32) {
    const Extents& shape = reference_.lse->shape();
    const auto* lse = reference_.lse->view().as<float>();
    const std::vector<float> given(lse, lse + shape.product());
    const ConstTensorView whole = reference_.lse->view();
    const Tensor rounded = tensor_of(reference_.lse_dtype, shape, given);
    EXPECT_EQ(numbers_of(rounded.view(), whole, reference_.lse_dtype).output,
              std::vector<double>(given.begin(), given.end()));
  }
  if (reference_.taken_for) {
    const ReferenceDeviation found =
        deviation(oracle(reference_, reference_.problem), expected_, reference_.lse_dtype);
    EXPECT_GT(found.output, 0.01) << "the reference does not differ";
  }
}

// A comparison that overlooks one wrong element would prove nothing.
TEST_P(References, OneWrongElementIsNoticed) {
  const DType dtype = problem().dtype;
  const double wrong = dtype == DType::float32 ? 2e-5 : (dtype == DType::float16 ? 1e-2 : 6e-2);
  const OracleOutput right = oracle(reference_, problem());
  const ReferenceDeviation bound = bound_of(reference_);
  for (std::size_t i = 0; i < right.output.size(); i += 97) {
    OracleOutput changed = right;
    changed.output[i] += wrong;
    EXPECT_FALSE(agrees(deviation(changed, expected_, reference_.lse_dtype), bound)) << i;
  }
  for (std::size_t i = 0; reference_.lse && i < right.lse.size(); i += 29) {
    OracleOutput changed = right;
    changed.lse[i] =
        std::isinf(right.lse[i]) ? -2.4e38 : right.lse[i] + (dtype == DType::float32 ? 1e-4 : 0.1);
    EXPECT_FALSE(agrees(deviation(changed, expected_, reference_.lse_dtype), bound)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, References, ::testing::ValuesIn(reference_names()),
                         [](const auto& instance) { return instance.param; });

TEST(ReferenceFiles, AreAllThere) {
  EXPECT_EQ(reference_names().size(), 53U);
}

TEST(ReferenceFiles, AnotherNameIsRefused) {
  EXPECT_THROW((void)read_reference("jax_of_another_name"), UserError);
}

// ejkernel's rule is our policy bias_wins.
TEST(ReferenceFiles, WhereABiasWins) {
  const ReferenceCase reference = read_reference("ejkernel_bias_wins");
  EXPECT_TRUE(reference.problem.dense_mask);
  const AttentionProblem won = under_policy(BiasPolicy::bias_wins, reference.problem);
  EXPECT_FALSE(won.dense_mask);
  EXPECT_EQ(won.bias, reference.computed().bias);
  EXPECT_EQ(won.dense_mask, reference.computed().dense_mask);
}

}  // namespace
}  // namespace annulus::test
