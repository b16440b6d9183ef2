// The flash kernels of the general class: bias, dense mask and dropout.
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/score_cases.hpp"

namespace annulus::test {
namespace {

class CudaFlashGeneral : public CudaFlashTest {
 protected:
  CudaFlashGeneral() : CudaFlashTest("flash_attn2") {}

  [[nodiscard]] Result run(const WholeAttention& whole) {
    return run_on_device(implementation(), whole.problem, whole.block(),
                         {whole.query, whole.key, whole.value, &whole.bias, &whole.mask}, *device_,
                         *stream_);
  }
  void expect_right(const WholeAttention& whole) {
    SCOPED_TRACE(to_string(whole.problem.shape) + " mask " + to_string(whole.problem.mask));
    ASSERT_EQ(implementation().capability(whole.problem, device_->place()).reason(), "");
    expect_accurate(run(whole), whole, whole.oracle());
  }
  // Computes some rows and columns of the whole.
  void expect_part_right(const WholeAttention& whole, const PositionRanges& rows,
                         const PositionRanges& columns) {
    SCOPED_TRACE("rows " + to_string(rows) + " columns " + to_string(columns));
    const Tensor query = gather(whole.query.view(), rows);
    const Tensor key = gather(whole.key.view(), columns);
    const Tensor value = gather(whole.value.view(), columns);
    const Tensor bias = whole.problem.bias ? gather_rows(whole.bias, rows) : Tensor();
    const Tensor mask = whole.problem.dense_mask ? gather_rows(whole.mask, rows) : Tensor();
    AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), rows, columns};
    const AttentionShape& s = whole.problem.shape;
    const auto view = [](const Tensor& tensor) {
      return tensor.shape().rank() == 0 ? TensorView() : tensor.view();
    };
    const Extents shape{s.batch, s.heads, rows.size(), s.kv_length};
    block.scores = broadcast_scores(view(bias), view(mask), shape);
    const OracleOutput truth = reference_of(whole.problem, block);
    expect_accurate(run_on_device(implementation(), whole.problem, block,
                                  {query, key, value, &bias, &mask}, *device_, *stream_),
                    whole, truth);
    const Tensor cut_bias = whole.problem.bias ? gather_keys(bias, columns) : Tensor();
    const Tensor cut_mask = whole.problem.dense_mask ? gather_keys(mask, columns) : Tensor();
    block.scores = scores_by_column(cut_bias, cut_mask, shape, columns);
    expect_accurate(run_on_device(implementation(), whole.problem, block,
                                  {query, key, value, &cut_bias, &cut_mask}, *device_, *stream_),
                    whole, truth);
  }
};

// Full and broadcast, together with masks; hidden entries of the bias hold NaN or infinities.
TEST_F(CudaFlashGeneral, BiasAndDenseMask) {
  Random random(131);
  const std::int64_t dims[] = {64, 128, 256};
  int i = 0;
  for (const std::int64_t columns : {493, 512}) {
    for (const Extents& shape : score_shapes(2, 4, 331, columns)) {
      AttentionProblem problem = problem_of({2, 331, columns, 4, 2, dims[i % 3], dims[i % 3]},
                                            i % 2 == 0 ? DType::float16 : DType::bfloat16);
      if (i % 3 != 2) problem.bias = shape;
      if (i % 3 != 0) problem.dense_mask = shape;
      if (i % 4 == 1) problem.mask.set_window(150, 20);
      if (i % 4 == 2) problem.soft_cap = 3;
      if (i % 5 == 3) problem.mask = random_mask(random, {MaskKind::segments}, 2, 331, columns);
      ++i;
      const WholeAttention whole = random_attention(random, problem);
      spoil_hidden_bias(whole);
      expect_right(whole);
    }
  }
}

// The same entries drop as in the oracle, under every mask.
TEST_F(CudaFlashGeneral, Dropout) {
  Random random(132);
  const std::int64_t dims[] = {64, 128, 256};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    const std::int64_t dim = dims[i % 3];
    AttentionProblem problem =
        problem_of({2, 331, 493, 4, 2, dim, dim}, i % 2 == 0 ? DType::bfloat16 : DType::float16);
    problem.mask = random_mask(random, kinds, 2, 331, 493);
    problem.dropout.emplace(i % 4 == 0 ? 0.7 : 0.1, (std::uint64_t{3} << 40U) + 5);
    if (i++ % 5 == 0) problem.soft_cap = 3.0;
    expect_right(random_attention(random, problem));
  }
}

// Windows whose first columns lie at all distances from a multiple of 32.
TEST_F(CudaFlashGeneral, DropoutFromAnyPosition) {
  Random random(142);
  const std::int64_t dims[] = {64, 128, 256};
  for (std::int64_t left = 90; left < 122; ++left) {
    const std::int64_t dim = dims[left % 3];
    AttentionProblem problem = problem_of({1, 300, 300, 2, 1, dim, dim});
    problem.mask.set_window(left, 0);
    problem.dropout.emplace(0.3, static_cast<std::uint64_t>(left));
    expect_right(random_attention(random, problem));
  }
}

// Positions that begin at an odd one or have a stride.
TEST_F(CudaFlashGeneral, PartsOfSequenceLayouts) {
  Random random(133);
  for (const std::int64_t length : {1000, 1024}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      AttentionProblem problem = problem_of({2, length, length, 2, 1, dim, dim});
      problem.mask.set_causal(true);
      problem.dropout.emplace(0.2, 9);
      problem.bias = Extents{1, 2, length, length};
      problem.dense_mask = Extents{2, 1, length, length};
      const WholeAttention whole = random_attention(random, problem);
      for (const LayoutKind kind :
           {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
        const SequenceLayout layout(kind, length, 3);
        expect_part_right(whole, layout.positions(2), layout.positions(2));
        expect_part_right(whole, layout.positions(2), layout.positions(0));
      }
    }
  }
}

// Blocks whose pairs are all visible still depend on their positions.
TEST_F(CudaFlashGeneral, UnmaskedBlocks) {
  Random random(134);
  AttentionProblem problem = problem_of({1, 512, 512, 2, 2, 128, 128});
  problem.mask.set_causal(true);
  problem.dropout.emplace(0.5, 1);
  const WholeAttention whole = random_attention(random, problem);
  const PositionRanges rows({PositionRange{GlobalPosition(256), 256}});
  for (const std::int64_t first : {0, 100}) {
    const PositionRanges columns({PositionRange{GlobalPosition(first), 128}});
    const Tensor query = gather(whole.query.view(), rows);
    const Tensor key = gather(whole.key.view(), columns);
    const Tensor value = gather(whole.value.view(), columns);
    AttentionBlock block{as_bthd(query), as_bthd(key), as_bthd(value), rows, columns};
    const OracleOutput truth = reference_of(problem, block);
    block.unmasked = true;
    expect_accurate(
        run_on_device(implementation(), problem, block, {query, key, value}, *device_, *stream_),
        whole, truth);
  }
}

// A value that a dense mask or a bias hides from some rows reaches only the others.
TEST_F(CudaFlashGeneral, HiddenValuesReachNoRow) {
  Random random(135);
  for (const bool by_bias : {false, true}) {
    AttentionProblem problem = problem_of({1, 256, 384, 2, 2, 128, 128});
    const Extents shape{1, 1, 256, 384};
    if (by_bias) {
      problem.bias = shape;
    } else {
      problem.dense_mask = shape;
    }
    problem.dropout.emplace(0.3, 2);
    const WholeAttention whole = random_attention(random, problem);
    for (std::int64_t row = 0; row < 256; ++row) {
      const bool shown = row < 100;
      if (by_bias) {
        whole.bias.view().at<float>({0, 0, row, 77}) =
            shown ? 0 : -std::numeric_limits<float>::infinity();
      } else {
        whole.mask.view().at<std::uint8_t>({0, 0, row, 77}) = shown ? 1 : 0;
      }
    }
    const OracleOutput truth = whole.oracle();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Tensor* tensor : {&whole.key, &whole.value}) {
      for (std::int64_t i = 0; i < 2 * 128; ++i) {
        from_float32(&nan, problem.dtype,
                     static_cast<std::byte*>(tensor->view().data()) + 2 * (77 * 2 * 128 + i), 1);
      }
    }
    const Result result = run(whole);
    for (std::int64_t row = 0; row < 256; ++row) {
      for (std::int64_t i = 0; i < 2 * 128; ++i) {
        const float x = result.output.view().as<float>()[row * 256 + i];
        if (row < 100) {
          EXPECT_TRUE(std::isnan(x)) << row;
        } else {
          ASSERT_NEAR(x, truth.output[static_cast<std::size_t>(row * 256 + i)], 0.03) << row;
        }
      }
    }
  }
}

// Rows that see no key, and rows whose biases are all near the most negative float32.
TEST_F(CudaFlashGeneral, RowsThatSeeNothing) {
  Random random(136);
  for (const bool masked : {false, true}) {
    AttentionProblem problem = problem_of({1, 256, 384, 2, 2, 128, 128});
    problem.bias = Extents{1, 1, 256, 384};
    if (masked) problem.dense_mask = Extents{1, 1, 256, 384};
    const WholeAttention whole = random_attention(random, problem);
    for (std::int64_t column = 0; column < 384; ++column) {
      float& bias = whole.bias.view().at<float>({0, 0, 3, column});
      if (masked) {
        whole.mask.view().at<std::uint8_t>({0, 0, 3, column}) = 0;
      } else {
        bias = -std::numeric_limits<float>::infinity();
      }
      whole.bias.view().at<float>({0, 0, 100, column}) = -std::numeric_limits<float>::max();
      whole.bias.view().at<float>({0, 0, 200, column}) = -1.5e38F;
    }
    const Result result = run(whole);
    const OracleOutput truth = whole.oracle();
    for (std::int64_t i = 0; i < 2 * 128; ++i) {
      EXPECT_EQ(result.output.view().as<float>()[3 * 256 + i], 0) << i;
      for (const std::int64_t row : {100, 200}) {  // equal weights: the logits round away
        EXPECT_NEAR(result.output.view().as<float>()[row * 256 + i],
                    truth.output[static_cast<std::size_t>(row * 256 + i)], 1)
            << i;
      }
    }
    EXPECT_EQ(result.lse.view().as<float>()[3], -std::numeric_limits<float>::infinity());
  }
}

// A row whose biases are all far below any logit attends to the largest of them.
TEST_F(CudaFlashGeneral, TheLargestOfTinyBiasesWins) {
  Random random(140);
  for (const double cap : {0.0, 50.0}) {
    AttentionProblem problem = problem_of({1, 130, 300, 1, 1, 128, 128});
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
  AttentionProblem problem = problem_of({2, 300, 500, 4, 2, 128, 128}, DType::float16);
  problem.bias = Extents{2, 4, 300, 500};
  problem.dense_mask = Extents{1, 1, 300, 500};
  problem.dropout.emplace(0.4, 12);
  const WholeAttention whole = random_attention(random, problem);
  const Mirror query(whole.query, *device_);
  const Mirror bias(whole.bias, *device_);
  const Mirror mask(whole.mask, *device_);
  Result result(whole.block(), DType::float64);
  const Mirror output(result.output, *device_);
  const Mirror lse(result.lse, *device_);
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
      const Mirror key(keys, *device_);
      const Mirror value(values, *device_);
      AttentionBlock block{query.view().slice(2, head, 2),
                           key.at(as_bthd(keys)).slice(2, head / 2, 1),
                           value.at(as_bthd(values)).slice(2, head / 2, 1), whole.rows(), parts[p]};
      block.first_head = head;
      block.scores = broadcast_scores(bias.view(), mask.view(), {2, 4, 300, 500}).slice(1, head, 2);
      const SoftmaxState state{output.view().slice(2, head, 2), lse.view().slice(1, head, 2)};
      if (p > 0) block.state = state;
      kernel->prepare(block, state);
      kernel->forward(block, state, {*stream_, nullptr, 1});
      stream_->synchronize();
    }
  }
  output.download();
  lse.download();
  expect_accurate(result, whole, whole.oracle());
}

// With dropout, a state to which a call adds nothing stays as it is: whole tiles, and single rows.
TEST_F(CudaFlashGeneral, StatesThatStayAsTheyAre) {
  Random random(139);
  AttentionProblem problem = problem_of({1, 384, 384, 2, 2, 64, 64});
  problem.mask.set_window(40, 0);
  problem.dropout.emplace(0.3, 4);
  const WholeAttention whole = random_attention(random, problem);
  const Mirror query(whole.query, *device_);
  const Mirror key(whole.key, *device_);
  const Mirror value(whole.value, *device_);
  Result result(whole.block(), DType::float32);
  const Mirror output(result.output, *device_);
  const Mirror lse(result.lse, *device_);
  const SoftmaxState state{output.view(), lse.view()};
  const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
  for (const std::int64_t begin : {0, 192}) {
    AttentionBlock block{query.view(), key.view().slice(1, begin, 192),
                         value.view().slice(1, begin, 192), whole.rows(),
                         whole.columns().slice({LocalPosition(begin), 192})};
    if (begin > 0) block.state = state;
    kernel->prepare(block, state);
    kernel->forward(block, state, {*stream_, nullptr, 1});
  }
  stream_->synchronize();
  output.download();
  lse.download();
  expect_accurate(result, whole, whole.oracle());
}

TEST_F(CudaFlashGeneral, ABiasThatIsMissingIsAnError) {
  AttentionProblem problem = problem_of({1, 8, 8, 1, 1, 64, 64});
  Random random(138);
  const WholeAttention whole = random_attention(random, problem);
  problem.bias = Extents{1, 1, 8, 8};
  EXPECT_THROW((void)run_on_device(implementation(), problem, whole.block(),
                                   {whole.query, whole.key, whole.value}, *device_, *stream_),
               InternalError);
}

TEST_F(CudaFlashGeneral, Float32IsRefused) {
  AttentionProblem problem = problem_of({1, 8, 8, 1, 1, 64, 64}, DType::float32);
  problem.dropout.emplace(0.1, 1);
  EXPECT_NE(implementation().capability(problem, device_->place()).reason().find("half types"),
            std::string::npos);
}

}  // namespace
}  // namespace annulus::test
