#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/attention/cuda_gradients_run.hpp"

namespace annulus::test {

struct Dims {
  std::int64_t head, value;
  DType dtype = DType::bfloat16;
};
/// Dimensions for each kernel; kernels of bfloat16 have a counterpart for float16, and take
/// modifiers.
inline constexpr Dims kAllDims[] = {{64, 64},
                                    {128, 128},
                                    {192, 128},
                                    {256, 256},
                                    {64, 64, DType::float32},
                                    {128, 128, DType::float32}};

inline constexpr std::span<const Dims> kHalfDims{kAllDims, 4};

/// Gradients of flash attention on the device, beside the oracle's.
class CudaFlashBackward : public CudaGradientsTest {
 protected:
  CudaFlashBackward() : CudaGradientsTest("flash_attn2") {}

  void SetUp() override {
    CudaGradientsTest::SetUp();
    if (IsSkipped()) return;
    const Capability can = flash().available(device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  [[nodiscard]] const Implementation& flash() const { return implementation(); }

  /// Adds to gradients in host memory, all of which are wanted.
  void add_block(const AttentionProblem& problem, const BackwardBlock& block,
                 const Gradients& gradients) {
    backward_on(*device_, *stream_, *flash().make_kernel(problem, *device_), block, gradients);
  }

  void expect_accurate(Random& random, const AttentionProblem& problem) {
    CudaGradientsTest::expect_accurate(WholeGradients(random, problem));
  }
  void expect_all_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, kAllDims);
  }
  void expect_half_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, kHalfDims);
  }
  void expect_accurate(Random& random, AttentionProblem problem, std::span<const Dims> all) {
    for (const Dims& dims : all) {
      problem.shape.head_dim = dims.head;
      problem.shape.value_dim = dims.value;
      problem.dtype = dims.dtype;
      expect_accurate(random, problem);
      if (dims.dtype == DType::float32) continue;
      problem.dtype = DType::float16;
      expect_accurate(random, problem);
    }
  }

  /// Checks gradients, and that they have the same bits in ten runs.
  void expect_same_bits(Random& random, const AttentionProblem& problem) {
    repeats_bits_ = true;
    const WholeGradients whole(random, problem);
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
    const std::vector<float> first = floats_of(whole);
    for (int run = 1; run < 10; ++run) {
      whole.clear();
      add(whole);
      ASSERT_TRUE(same_bits(floats_of(whole), first));
    }
  }

  void expect_blocks_add_up(const Dims& dims, std::optional<Dropout> dropout = {}) {
    Random random(6);
    AttentionProblem problem =
        causal_problem_of({2, 320, 320, 4, 2, dims.head, dims.value}, dims.dtype);
    problem.mask.set_kv_lengths({320, 250});
    problem.dropout = dropout;
    const WholeGradients whole(random, problem);
    add(whole, parts_of(whole));
    EXPECT_LT(whole.largest_share(), 1);
  }

  /// Parts of two batches of 320 rows and columns. The first and the last rows are ranges, as in
  /// zigzag shards. Each part of the rows between them has every third row. Key tiles begin at
  /// multiples of 16, of 4 and of 1.
  static std::vector<GradientPart> parts_of(const WholeGradients& whole) {
    std::vector<GradientPart> parts;
    for (const PositionRun& rows :
         std::vector<PositionRun>{{0, 80}, {240, 80}, {80, 54, 3}, {81, 53, 3}, {82, 53, 3}}) {
      const std::vector<PositionRun> columns =
          rows.step == 1 ? std::vector<PositionRun>{{0, 84}, {84, 155}, {239, 81}}
                         : std::vector<PositionRun>{{0, 107, 3}, {1, 107, 3}, {2, 106, 3}};
      for (const PositionRun& c : columns) {
        for (std::int64_t b = 0; b < 2; ++b) parts.push_back(part_of(whole, b, rows, c));
      }
    }
    return parts;
  }
};

}  // namespace annulus::test
