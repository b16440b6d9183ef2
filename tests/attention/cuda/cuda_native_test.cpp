// The native kernel on a GPU, beside the suite that every implementation has to pass
// (tests/attention/suite).
#include <annulus/core/error.hpp>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/score_cases.hpp"

namespace annulus::test {
namespace {

using CudaNative = CudaTest;

// More ranges than one launch takes, of rows and of columns.
TEST_F(CudaNative, ManyRanges) {
  Random random(53);
  const std::int64_t length = 400;
  std::vector<PositionRange> ranges;
  for (std::int64_t start = 0; start < length; start += 8) {
    ranges.push_back({GlobalPosition(start), 3, 2});
  }
  const PositionRanges positions(ranges);
  ASSERT_GT(positions.ranges().size(), 48U);
  AttentionProblem problem = problem_of({2, length, length, 4, 2, 16, 16});
  problem.mask = random_mask(random, {MaskKind::window, MaskKind::segments}, 2, length, length);
  problem.dropout.emplace(0.2, 4);
  problem.bias = Extents{1, 4, length, length};
  problem.dense_mask = Extents{2, 1, length, length};
  const WholeAttention whole = random_attention(random, problem);
  const Tensor bias = gather_rows(whole.bias, positions);
  const Tensor mask = gather_rows(whole.mask, positions);
  const Tensor query = gather(whole.query.view(), positions);
  const Tensor key = gather(whole.key.view(), positions);
  const Tensor value = gather(whole.value.view(), positions);
  AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), positions, positions};
  block.scores = broadcast_scores(bias.view(), mask.view(), {2, 4, positions.size(), length});
  const OracleOutput truth = reference_of(problem, block);
  expect_accurate(run_on_device(native(), problem, block, *device_, *stream_), whole, truth);
  const Tensor cut_bias = gather_keys(bias, positions);
  const Tensor cut_mask = gather_keys(mask, positions);
  block.scores = scores_by_column(cut_bias, cut_mask, {2, 4, positions.size(), length}, positions);
  expect_accurate(run_on_device(native(), problem, block, *device_, *stream_), whole, truth);
}

TEST_F(CudaNative, RefusesWhatDoesNotFit) {
  Random random(56);
  AttentionProblem problem = problem_of({1, 4, 6, 2, 1, 8, 8});
  const WholeAttention whole = random_attention(random, problem);
  const std::unique_ptr<Kernel> kernel = native().make_kernel(problem, *device_);
  const Result result(whole.block());
  const Tensor half(DType::bfloat16, result.output.shape(), test_memory());
  EXPECT_THROW(
      kernel->forward(whole.block(), {half.view(), result.lse.view()}, {*stream_, nullptr, 1}),
      InternalError)
      << "the output is float32";
  EXPECT_THROW(
      kernel->forward(whole.block(), {result.output.view(), result.lse.view(), half.view()},
                      {*stream_, nullptr, 1}),
      InternalError)
      << "the maximum is like the LSE";
  problem.dtype = DType::float64;
  EXPECT_FALSE(native().capability(problem, device_->place()));
}

}  // namespace
}  // namespace annulus::test
