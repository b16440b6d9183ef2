// The native kernel on a GPU, against the oracle and the CPU.
#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/attention/wide_range.hpp"

namespace annulus::test {
namespace {

class CudaNative : public CudaTest {
 protected:
  void expect_whole_accurate(const WholeAttention& whole) {
    SCOPED_TRACE(to_string(whole.problem.shape) + " " + std::string(name_of(whole.problem.dtype)) +
                 " mask " + to_string(whole.problem.mask));
    const OracleOutput truth = whole.oracle();
    expect_accurate(run_on_device(native(), whole, *device_, *stream_), whole, truth);
    expect_accurate(run_on_device(native(), whole, *device_, *stream_, DType::float64), whole,
                    truth);
  }
};

TEST_F(CudaNative, EveryMaskAloneAndInPairs) {
  Random random(51);
  const DType dtypes[] = {DType::float32, DType::bfloat16, DType::float16};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    AttentionProblem problem = problem_of({2, 131, 293, 4, 2, 16, 40}, dtypes[i++ % 3]);
    problem.mask = random_mask(random, kinds, 2, 131, 293);
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaNative, BlockMasks) {
  Random random(57);
  int i = 0;
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    if (i++ % 4 != 0) continue;
    AttentionProblem problem = problem_of({2, 131, 293, 4, 2, 16, 40});
    problem.mask = random_mask(random, kinds, 2, 131, 293);
    problem.mask.set_block_mask(random_block_mask(random, 2, 4, 131, 293, 60));
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaNative, ShapesScalesAndSoftCaps) {
  Random random(52);
  for (const AttentionShape& shape :
       {AttentionShape{1, 1, 1, 1, 1, 1, 1}, AttentionShape{1, 5, 33, 8, 1, 3, 70},
        AttentionShape{2, 64, 64, 3, 3, 128, 128}, AttentionShape{1, 7, 0, 2, 2, 8, 8},
        AttentionShape{1, 2, 40, 2, 1, 2000, 1600}}) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      AttentionProblem problem;
      problem.shape = shape;
      problem.dtype = dtype;
      expect_whole_accurate(random_attention(random, problem));
      problem.scale = -1.5 * problem.logit_scale();
      problem.soft_cap = 2.0;
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

TEST_F(CudaNative, Dropout) {
  Random random(58);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    AttentionProblem problem = problem_of({2, 131, 293, 4, 2, 16, 40}, dtype);
    problem.dropout.emplace(0.3, (std::uint64_t{5} << 32U) + 1);
    expect_whole_accurate(random_attention(random, problem));
    problem.mask.set_window(70, 20);
    problem.soft_cap = 3;
    expect_whole_accurate(random_attention(random, problem));
  }
}

// Full and broadcast, together with masks; hidden entries of the bias hold NaN or infinities.
TEST_F(CudaNative, BiasAndDenseMask) {
  Random random(59);
  int i = 0;
  for (const Extents& shape : score_shapes(2, 4, 131, 293)) {
    AttentionProblem problem =
        problem_of({2, 131, 293, 4, 2, 16, 40}, i % 2 == 0 ? DType::float32 : DType::bfloat16);
    if (i % 3 != 2) problem.bias = shape;
    if (i % 3 != 0) problem.dense_mask = shape;
    if (i % 4 == 1) problem.mask.set_window(70, 20);
    if (i % 4 == 2) problem.soft_cap = 3;
    ++i;
    const WholeAttention whole = random_attention(random, problem);
    spoil_hidden_bias(whole);
    expect_whole_accurate(whole);
  }
}

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
  expect_accurate(run_on_device(native(), problem, block, {query, key, value, &bias, &mask},
                                *device_, *stream_),
                  whole, truth);
  const Tensor cut_bias = gather_keys(bias, positions);
  const Tensor cut_mask = gather_keys(mask, positions);
  block.scores = scores_by_column(cut_bias, cut_mask, {2, 4, positions.size(), length}, positions);
  expect_accurate(run_on_device(native(), problem, block, {query, key, value, &cut_bias, &cut_mask},
                                *device_, *stream_),
                  whole, truth);
}

TEST_F(CudaNative, PartsOfTheBatchAndOfTheHeads) {
  Random random(54);
  AttentionProblem problem = problem_of({3, 70, 90, 4, 2, 8, 8});
  problem.mask = random_mask(random, {MaskKind::segments, MaskKind::kv_lengths}, 3, 70, 90);
  problem.mask.set_block_mask(BlockMask::random(70, 90, 4, 0.7, 1, {16, 16}));
  problem.dropout.emplace(0.2, 4);
  const WholeAttention whole = random_attention(random, problem);
  const AttentionBlock block = part_of_batch_and_heads(whole.block());
  expect_accurate(run_on_device(native(), problem, block, {whole.query, whole.key, whole.value},
                                *device_, *stream_),
                  whole, reference_of(problem, block));
}

TEST_F(CudaNative, ProductsBeyondFloat32ShowAsNan) {
  AttentionProblem problem = problem_of({1, 1, 3, 1, 1, 1, 1});
  const WholeAttention whole{problem, tensor_of(DType::float32, {1, 1, 1, 1}, {1e30F}),
                             tensor_of(DType::float32, {1, 3, 1, 1}, {-1e30F, 1e30F, 1.0F}),
                             tensor_of(DType::float32, {1, 3, 1, 1}, {1.0F, 2.0F, 3.0F})};
  const Result result = run_on_device(native(), whole, *device_, *stream_);
  EXPECT_TRUE(std::isnan(*result.output.view().as<float>()));
  EXPECT_TRUE(std::isnan(*result.lse.view().as<float>()));
}

TEST_F(CudaNative, HiddenNansAndInfinitiesReachNoRow) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    expect_non_finite_confined(dtype, [&](const WholeAttention& whole) {
      return run_on_device(native(), whole, *device_, *stream_);
    });
  }
}

TEST_F(CudaNative, IsRightAtTheEndsOfTheRange) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const WholeAttention whole = widest_attention(dtype, 64);
    expect_right_at_the_ends_of_the_range(whole,
                                          run_on_device(native(), whole, *device_, *stream_));
  }
}

TEST_F(CudaNative, RowsOfNoWeightAreNotEmpty) {
  const WholeAttention whole = weightless_attention();
  expect_weightless_shown(run_on_device(native(), whole, *device_, *stream_));
  // Columns in more ranges than one launch takes: the later launches go on from the earlier ones.
  AttentionBlock block = whole.block();
  std::vector<PositionRange> ranges;
  for (std::int64_t i = 0; i < 600; i += 10) ranges.push_back({GlobalPosition(i), 10});
  block.columns = PositionRanges(ranges);
  expect_weightless_shown(run_on_device(native(), whole.problem, block,
                                        {whole.query, whole.key, whole.value}, *device_, *stream_));
}

// One launch computes the maxima, or several that go on from each other.
TEST_F(CudaNative, MaximaOfRows) {
  Random random(60);
  std::vector<PositionRange> ranges;
  for (std::int64_t i = 0; i < 600; i += 10) ranges.push_back({GlobalPosition(i), 10});
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const bool many : {false, true}) {
      for (const DType lse : {DType::float32, DType::float64}) {
        AttentionProblem problem = problem_of({2, 40, 600, 4, 2, 16, 8}, dtype);
        problem.mask.set_causal(true);
        problem.mask.set_offset(-5);
        problem.mask.set_kv_lengths({600, 20});
        problem.dropout.emplace(0.3, 2);
        const WholeAttention whole = random_attention(random, problem);
        AttentionBlock block = whole.block();
        if (many) block.columns = PositionRanges(ranges);
        const Tensor maximum(DType::float32, {2, 4, 40}, test_memory());
        std::memset(maximum.view().data(), 0xff, maximum.bytes());
        const Result result =
            run_on_device(native(), problem, block, {whole.query, whole.key, whole.value}, *device_,
                          *stream_, lse, &maximum);
        const OracleOutput truth = whole.oracle();
        expect_accurate(result, whole, truth);
        for (std::size_t i = 0; i < truth.maximum.size(); ++i) {
          const float got = maximum.view().as<float>()[i];
          if (got == truth.maximum[i]) continue;  // −∞ too
          ASSERT_NEAR(got, truth.maximum[i], 1e-5) << i;
        }
      }
    }
  }
}

// Logits that are whole numbers have no rounding: the largest is exactly that.
TEST_F(CudaNative, MaximaAreExact) {
  Random random(61);
  AttentionProblem problem = problem_of({1, 40, 900, 2, 2, 4, 4});
  problem.scale = 1;
  const WholeAttention whole = random_attention(random, problem);
  for (const Tensor* tensor : {&whole.query, &whole.key}) {
    for (std::int64_t i = 0; i < tensor->shape().product(); ++i) {
      tensor->view().as<float>()[i] = static_cast<float>(draw(random, -6, 6));
    }
  }
  AttentionBlock block = whole.block();
  std::vector<PositionRange> ranges;
  for (std::int64_t i = 0; i < 900; i += 10) ranges.push_back({GlobalPosition(i), 10});
  block.columns = PositionRanges(ranges);
  const Tensor maximum(DType::float32, {1, 2, 40}, test_memory());
  static_cast<void>(run_on_device(native(), problem, block, {whole.query, whole.key, whole.value},
                                  *device_, *stream_, DType::float32, &maximum));
  const OracleOutput truth = whole.oracle();
  for (std::size_t i = 0; i < truth.maximum.size(); ++i) {
    ASSERT_EQ(maximum.view().as<float>()[i], truth.maximum[i]) << i;
  }
}

TEST_F(CudaNative, TheMaximumOfARowOfNansIsNan) {
  AttentionProblem problem = problem_of({1, 1, 3, 1, 1, 1, 1});
  const WholeAttention whole{problem, tensor_of(DType::float32, {1, 1, 1, 1}, {1}),
                             tensor_of(DType::float32, {1, 3, 1, 1}, {1, std::nanf(""), 2}),
                             tensor_of(DType::float32, {1, 3, 1, 1}, {1, 2, 3})};
  const Tensor maximum(DType::float32, {1, 1, 1}, test_memory());
  *maximum.view().as<float>() = 0;
  static_cast<void>(run_on_device(native(), problem, whole.block(),
                                  {whole.query, whole.key, whole.value}, *device_, *stream_,
                                  DType::float32, &maximum));
  EXPECT_TRUE(std::isnan(*maximum.view().as<float>()));
}

TEST_F(CudaNative, RunsRepeatEveryBit) {
  Random random(55);
  AttentionProblem problem = problem_of({1, 200, 500, 4, 2, 64, 64});
  problem.mask.set_causal(true);
  const WholeAttention whole = random_attention(random, problem);
  const Result first = run_on_device(native(), whole, *device_, *stream_);
  EXPECT_TRUE(run_on_device(native(), whole, *device_, *stream_) == first);
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
