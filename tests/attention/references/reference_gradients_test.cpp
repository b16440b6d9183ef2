// The oracle's gradients against those of JAX, PyTorch and ejkernel for the same inputs.
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/accuracy.hpp>
#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/convert.hpp>

#include "tests/attention/references/reference_case.hpp"

namespace annulus::test {
namespace {

class GradientReferences : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] OracleGradients oracle() const {
    const ReferenceCase& reference = given_.reference;
    return oracle_gradients(reference.problem, reference.query.view(), reference.key.view(),
                            reference.value.view(), given_.grad_output.view(),
                            given_.grad_lse.view(),
                            PositionRanges::all(reference.problem.shape.query_length), 0, 0, 0,
                            reference.scores(reference.problem));
  }

  // docs/semantics.md §6. The references are rounded to the operands' dtype.
  void expect_agrees(const Tensor& given, const OracleGradient& found, const char* name) const {
    ASSERT_EQ(given.shape().rank() == 0 ? 0U : static_cast<std::size_t>(given.view().elements()),
              found.values.size())
        << name;
    if (found.values.empty()) return;
    std::vector<float> values(found.values.size());
    to_float32(given.view().data(), given.dtype(), values.data(),
               static_cast<std::int64_t>(values.size()));
    double difference = 0;
    double magnitude = 0;
    double norm = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      difference += std::pow(values[i] - found.values[i], 2);
      magnitude += std::pow(found.magnitudes[i], 2);
      norm += std::pow(found.values[i], 2);
    }
    const double bound = 2 * accuracy_bound(given_.reference.problem).output;
    EXPECT_LE(std::sqrt(difference), bound * std::sqrt(magnitude)) << name;
    EXPECT_LE(std::sqrt(difference), 10 * bound * std::sqrt(norm)) << name << ", of its norm";
    EXPECT_GT(norm, 0) << name;
  }

  const ReferenceGradients given_ = read_reference_gradients(GetParam());
};

TEST_P(GradientReferences, OracleAgrees) {
  const OracleGradients found = oracle();
  expect_agrees(given_.query, found.query, "query");
  expect_agrees(given_.key, found.key, "key");
  expect_agrees(given_.value, found.value, "value");
  expect_agrees(given_.bias, found.bias, "bias");
  if (given_.sinks.shape().rank() > 0) expect_agrees(given_.sinks, found.sinks, "sinks");
}

INSTANTIATE_TEST_SUITE_P(Of, GradientReferences, ::testing::ValuesIn(reference_gradient_names()),
                         [](const auto& instance) { return instance.param; });

TEST(GradientReferenceFiles, AreAllThere) {
  EXPECT_EQ(reference_gradient_names().size(), 48U);
}

}  // namespace
}  // namespace annulus::test
