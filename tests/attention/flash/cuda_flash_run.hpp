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
  using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

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
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask) + " rows " + to_string(block.rows) + " columns " +
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

  /// Columns in parts (begin, count), each continuing from the state of the earlier parts. `run`
  /// computes a block on the stream. The last part writes its output in dtype `last` to memory of
  /// its own; without `last`, to the state.
  [[nodiscard]] Result run_in_parts(
      const WholeAttention& whole, const Pairs& parts, std::optional<DType> last,
      const std::function<void(AttentionBlock&, const SoftmaxState&)>& run) {
    const Mirror query(whole.query, *device_);
    const Mirror key(whole.key, *device_);
    const Mirror value(whole.value, *device_);
    Result result(whole.block(), DType::float64);
    const Mirror output(result.output, *device_);
    const Mirror lse(result.lse, *device_);
    const SoftmaxState state{output.view(), lse.view()};
    const Tensor last_output(last.value_or(DType::float32), result.output.shape(), test_memory());
    const Mirror last_mirror(last_output, *device_);
    const SoftmaxState end = last ? SoftmaxState{last_mirror.view(), lse.view()} : state;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& [begin, count] = parts[i];
      AttentionBlock block{query.view(), key.view().slice(1, begin, count),
                           value.view().slice(1, begin, count), whole.rows(),
                           whole.columns().slice({LocalPosition(begin), count})};
      if (i > 0) block.state = state;
      run(block, i + 1 < parts.size() ? state : end);
    }
    stream_->synchronize();
    output.download();
    lse.download();
    if (last) {
      last_mirror.download();
      to_float32(last_output.view().data(), *last, result.output.view().as<float>(),
                 last_output.view().elements());
    }
    return result;
  }

 private:
  std::string name_;
  Registry registry_ = Registry::standard();
};

}  // namespace annulus::test
