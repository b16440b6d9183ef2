#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {

/// The flash kernel under one of its names, on a device that has what it needs; else skipped.
class CudaFlashTest : public CudaTest {
 protected:
  explicit CudaFlashTest(std::string name) : name_(std::move(name)) {}

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Capability can =
        implementation().capability(half_problem({1, 8, 8, 1, 1, 64, 64}), device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  [[nodiscard]] const Implementation& implementation() const { return registry_.get(name_); }

  void expect_block_accurate(const AttentionProblem& problem, const AttentionBlock& block,
                             const OracleOutput& truth) {
    SCOPED_TRACE(describe(problem) + " rows " + to_string(block.rows) + " columns " +
                 to_string(block.columns));
    ASSERT_EQ(implementation().capability(problem, device_->place()).reason(), "");
    ASSERT_EQ(implementation().takes(problem, geometry_of(block)).reason(), "");
    const WholeAttention bounds{problem, {}, {}, {}};
    for (const DType lse : {DType::float32, DType::float64}) {
      expect_accurate(run_on_device(implementation(), problem, block, *device_, *stream_, lse),
                      bounds, truth);
    }
  }

  void expect_whole_accurate(const WholeAttention& whole) {
    expect_block_accurate(whole.problem, whole.block(), whole.oracle());
  }

 private:
  std::string name_;
  Registry registry_ = Registry::standard();
};

}  // namespace annulus::test
