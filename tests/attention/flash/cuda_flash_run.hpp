#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/partition/sequence_layout.hpp>

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
  using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

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
  void expect_edges_accurate(Random& random, DType dtype, const Pairs& lengths) {
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

  /// Head dimensions of queries and values: those of tiles, others, and `more`.
  void expect_dimensions_accurate(Random& random, DType dtype, const Pairs& more) {
    Pairs all{{64, 64}, {128, 128}, {192, 128}, {256, 256},
              {80, 80}, {96, 64},   {200, 136}, {64, 256}};
    all.insert(all.end(), more.begin(), more.end());
    for (const auto& [dim, value_dim] : all) {
      AttentionProblem problem = problem_of({1, 200, 300, 2, 1, dim, value_dim}, dtype);
      expect_whole_accurate(random_attention(random, problem));
      problem.mask.set_causal(true);
      problem.soft_cap = 20.0;
      expect_whole_accurate(random_attention(random, problem));
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

  /// Columns in parts (begin, count), each continuing from the state of those before. `run`
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

  void expect_parts_of_layouts_accurate(Random& random, DType dtype) {
    AttentionProblem problem = problem_of({2, 1000, 1000, 2, 1, 128, 128}, dtype);
    for (const std::vector<MaskKind>& kinds :
         {std::vector{MaskKind::causal}, std::vector{MaskKind::window, MaskKind::causal},
          std::vector{MaskKind::causal, MaskKind::documents},
          std::vector{MaskKind::causal, MaskKind::segments},
          std::vector{MaskKind::query_lengths, MaskKind::kv_lengths}}) {
      problem.mask = random_mask(random, kinds, 2, 1000, 1000);
      const WholeAttention whole = random_attention(random, problem);
      for (const LayoutKind kind :
           {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
        const SequenceLayout layout(kind, 1000, 3);
        expect_part_accurate(whole, layout.positions(0), layout.positions(2));
        expect_part_accurate(whole, layout.positions(1), layout.positions(1));
      }
    }
  }

 private:
  std::string name_;
  Registry registry_ = Registry::standard();
};

}  // namespace annulus::test
