// The flash kernels of the general class: bias, dense mask and dropout.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/attention/flash/cuda_flash_run.hpp"

namespace annulus::test {
namespace {

class CudaFlashGeneral : public CudaFlashTest {
 protected:
  CudaFlashGeneral() : CudaFlashTest("flash_attn2") {}

  [[nodiscard]] Result run(const WholeAttention& whole) {
    return run_on_device(implementation(), whole, *device_, *stream_);
  }
};

// Rows whose biases are all near the most negative float32: their logits round away.
TEST_F(CudaFlashGeneral, RowsOfTheMostNegativeBiases) {
  Random random(136);
  AttentionProblem problem = half_problem({1, 256, 384, 2, 2, 128, 128});
  problem.bias = Extents{1, 1, 256, 384};
  const WholeAttention whole = random_attention(random, problem);
  for (std::int64_t column = 0; column < 384; ++column) {
    whole.bias.view().at<float>({0, 0, 100, column}) = -std::numeric_limits<float>::max();
    whole.bias.view().at<float>({0, 0, 200, column}) = -1.5e38F;
  }
  const Result result = run(whole);
  const OracleOutput truth = whole.oracle();
  for (std::int64_t i = 0; i < 2 * 128; ++i) {
    for (const std::int64_t row : {100, 200}) {
      EXPECT_NEAR(result.output.view().as<float>()[row * 256 + i],
                  truth.output[static_cast<std::size_t>(row * 256 + i)], 1);
    }
  }
}

// A row whose biases are all far below any logit attends to the largest of them.
TEST_F(CudaFlashGeneral, TheLargestOfTinyBiasesWins) {
  Random random(140);
  for (const double cap : {0.0, 50.0}) {
    AttentionProblem problem = half_problem({1, 130, 300, 1, 1, 128, 128});
    problem.bias = Extents{1, 1, 130, 300};
    if (cap > 0) problem.soft_cap = cap;
    const WholeAttention whole = random_attention(random, problem);
    for (const std::int64_t row : {0, 7, 129}) {
      for (std::int64_t column = 0; column < 300; ++column) {
        whole.bias.view().at<float>({0, 0, row, column}) = column == 270 - row ? -1e38F : -1.1e38F;
      }
    }
    // The LSE is about −1e38, with an error to match.
    const AccuracyBound bound = accuracy_bound(problem.dtype, 300);
    EXPECT_LE(error_of(run(whole), problem.dtype, whole.oracle()).output, bound.output) << cap;
  }
}

// Several ranges with partial last tiles, continued states, and some of the heads.
TEST_F(CudaFlashGeneral, PartsThatContinueEachOther) {
  Random random(137);
  AttentionProblem problem = half_problem({2, 300, 500, 4, 2, 128, 128}, DType::float16);
  problem.bias = Extents{2, 4, 300, 500};
  problem.dense_mask = Extents{1, 1, 300, 500};
  problem.dropout.emplace(0.4, 12);
  const WholeAttention whole = random_attention(random, problem);
  const Result result(whole.block(), DType::float64);
  const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
  const std::vector<PositionRanges> parts{
      PositionRanges(
          {PositionRange{GlobalPosition(430), 70}, PositionRange{GlobalPosition(0), 50}}),
      PositionRanges({PositionRange{GlobalPosition(50), 190, 2}}),
      PositionRanges({PositionRange{GlobalPosition(51), 190, 2}})};
  for (std::int64_t head = 0; head < 4; head += 2) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const Tensor keys = gather(whole.key.view(), parts[p]);
      const Tensor values = gather(whole.value.view(), parts[p]);
      AttentionBlock block{whole.query.view().slice(2, head, 2),
                           as_bthd(keys).slice(2, head / 2, 1),
                           as_bthd(values).slice(2, head / 2, 1), whole.rows(), parts[p]};
      block.first_head = head;
      block.scores = whole.scores().slice(1, head, 2);
      const SoftmaxState state{result.output.view().slice(2, head, 2),
                               result.lse.view().slice(1, head, 2)};
      if (p > 0) block.state = state;
      forward_on(*device_, *stream_, *kernel, block, state);
    }
  }
  expect_accurate(result, whole, whole.oracle());
}

// Where dropout takes the heaviest keys of a row, the weights that are left are small: they keep
// their precision in float16, and in a continued state too.
TEST_F(CudaFlashGeneral, DropoutThatLeavesSmallWeights) {
  Random random(141);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem = half_problem({2, 384, 640, 3, 1, dim, dim}, DType::float16);
    problem.scale = 8 / std::sqrt(static_cast<double>(dim));
    problem.dropout.emplace(0.9, 13);
    const WholeAttention whole = random_attention(random, problem);
    expect_whole_accurate(whole);
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    const Result parts = in_parts(*device_, *stream_, whole, {{0, 300}, {300, 340}}, DType::float16,
                                  [&](AttentionBlock& block, const SoftmaxState& state) {
                                    kernel->prepare(block, state);
                                    kernel->forward(block, state, {*stream_, nullptr, 1});
                                  });
    expect_accurate(parts, whole, whole.oracle());
  }
}

// Logits so large that a sum with the weights' exponent is rounded: equal weights give the mean.
TEST_F(CudaFlashGeneral, EqualWeightsUnderHugeBiases) {
  Random random(142);
  for (const float bias : {3e6F, 6e7F, -6e7F, 1e8F, -1e8F, 1e30F}) {
    AttentionProblem problem = half_problem({1, 70, 200, 2, 1, 64, 64}, DType::float16);
    problem.bias = Extents{1, 1, 70, 200};
    const WholeAttention whole = random_attention(random, problem);
    std::memset(whole.query.view().data(), 0, whole.query.bytes());
    std::fill_n(whole.bias.view().as<float>(), whole.bias.shape().product(), bias);
    const AccuracyBound bound = accuracy_bound(problem.dtype, 200);
    EXPECT_LE(error_of(run(whole), problem.dtype, whole.oracle()).output, bound.output) << bias;
  }
}

TEST_F(CudaFlashGeneral, ABiasThatIsMissingIsAnError) {
  AttentionProblem problem = half_problem({1, 8, 8, 1, 1, 64, 64});
  Random random(138);
  const WholeAttention whole = random_attention(random, problem);
  problem.bias = Extents{1, 1, 8, 8};
  EXPECT_THROW((void)run_on_device(implementation(), problem, whole.block(), *device_, *stream_),
               InternalError);
}

TEST_F(CudaFlashGeneral, Float32IsRefused) {
  AttentionProblem problem = half_problem({1, 8, 8, 1, 1, 64, 64}, DType::float32);
  problem.dropout.emplace(0.1, 1);
  EXPECT_NE(implementation().capability(problem, device_->place()).reason().find("half types"),
            std::string::npos);
}

}  // namespace
}  // namespace annulus::test
