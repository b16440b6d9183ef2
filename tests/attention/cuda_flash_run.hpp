#pragma once

#include <string>

#include "tests/attention/cuda_run.hpp"

namespace annulus::test {

inline AttentionProblem problem_of(const AttentionShape& shape, DType dtype = DType::bfloat16) {
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  return problem;
}

/// The flash kernel under one of its names, on a device that has what it needs; else skipped.
class CudaFlashTest : public CudaTest {
 protected:
  explicit CudaFlashTest(std::string name) : name_(std::move(name)) {}

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Capability can =
        implementation().capability(problem_of({1, 8, 8, 1, 1, 64, 64}), device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  [[nodiscard]] const Implementation& implementation() const { return registry_.get(name_); }

  void expect_block_accurate(const AttentionProblem& problem, const AttentionBlock& block,
                             const Sources& sources, const OracleOutput& truth) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask) + " rows " + to_string(block.rows) + " columns " +
                 to_string(block.columns));
    ASSERT_EQ(implementation().capability(problem, device_->place()).reason(), "");
    ASSERT_EQ(implementation().takes(problem, geometry_of(block)).reason(), "");
    const WholeAttention bounds{problem, {}, {}, {}};
    for (const DType lse : {DType::float32, DType::float64}) {
      expect_accurate(
          run_on_device(implementation(), problem, block, sources, *device_, *stream_, lse), bounds,
          truth);
    }
  }

  void expect_whole_accurate(const WholeAttention& whole) {
    expect_block_accurate(whole.problem, whole.block(), {whole.query, whole.key, whole.value},
                          whole.oracle());
  }

  /// Rows and columns of the whole, stored head by head.
  void expect_part_accurate(const WholeAttention& whole, const PositionRanges& rows,
                            const PositionRanges& columns) {
    const Tensor query = gather(whole.query.view(), rows);
    const Tensor key = gather(whole.key.view(), columns);
    const Tensor value = gather(whole.value.view(), columns);
    const AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), rows, columns};
    expect_block_accurate(whole.problem, block, {query, key, value},
                          reference_of(whole.problem, block));
  }

 private:
  std::string name_;
  Registry registry_ = Registry::standard();
};

}  // namespace annulus::test
