#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

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

  /// Tiles that are cut short, of which a causal mask leaves parts, or rows that see nothing.
  void expect_edges_accurate(Random& random, DType dtype,
                             const std::vector<std::pair<std::int64_t, std::int64_t>>& lengths) {
    for (const std::int64_t dim : {64, 128, 256}) {
      for (const auto& [rows, columns] : lengths) {
        AttentionProblem problem = problem_of({2, rows, columns, 2, 2, dim, dim}, dtype);
        expect_whole_accurate(random_attention(random, problem));
        problem.mask.set_causal(true);
        expect_whole_accurate(random_attention(random, problem));
        problem.mask.set_offset(columns - rows);  // bottom-right: rows may see nothing
        expect_whole_accurate(random_attention(random, problem));
      }
    }
  }

  /// More work items than multiprocessors.
  void expect_grouped_heads_accurate(Random& random, DType dtype) {
    for (const auto& [heads, kv_heads] :
         {std::pair{4, 4}, std::pair{8, 2}, std::pair{9, 3}, std::pair{8, 1}}) {
      AttentionProblem problem = problem_of({3, 700, 700, heads, kv_heads, 64, 64}, dtype);
      problem.mask.set_causal(true);
      expect_whole_accurate(random_attention(random, problem));
    }
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
