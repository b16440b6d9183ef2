// Gradients by cuDNN against the oracle's, and what it refuses.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include <annulus/core/error.hpp>

#include "tests/attention/cuda_gradients_run.hpp"
#include "tests/attention/cudnn/cuda_sdpa.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

class CudaSdpaBackward : public CudaGradientsTest {
 protected:
  CudaSdpaBackward() : CudaGradientsTest("sdpa", 0.8) {}

  void SetUp() override {
    CudaGradientsTest::SetUp();
    if (IsSkipped()) return;
    if (cuda_devices().front().compute_capability < 90) {
      GTEST_SKIP() << "needs compute capability 9.0: others have no backward pass beyond 128 dims";
    }
    ASSERT_EQ(sdpa().available(device_->place()).reason(), "") << "nothing but the GPU may miss";
  }

  void expect_all_accurate(Random& random, AttentionProblem problem) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{256, 256}, std::pair{192, 128}}) {
      problem.shape.head_dim = dim;
      problem.shape.value_dim = value_dim;
      expect_accurate(WholeGradients(random, problem));
    }
  }
};

TEST_F(CudaSdpaBackward, FullAndCausal) {
  Random random(201);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const auto& [heads, kv_heads] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{3, 1}}) {
      for (const bool causal : {false, true}) {
        AttentionProblem problem = problem_of({1, 256, 256, heads, kv_heads, 0, 0}, dtype);
        problem.mask.set_causal(causal);
        expect_all_accurate(random, problem);
      }
    }
  }
}

// Among them key lengths of 64 beyond a multiple of 128, and single rows and columns.
TEST_F(CudaSdpaBackward, OddLengths) {
  Random random(202);
  for (const auto& [rows, columns] :
       {std::pair{133, 221}, std::pair{221, 133}, std::pair{128, 192}, std::pair{192, 64},
        std::pair{1, 130}, std::pair{130, 1}, std::pair{3, 5}}) {
    AttentionProblem problem = half_problem({2, rows, columns, 4, 2, 0, 0});
    expect_all_accurate(random, problem);
    if (rows == 1) continue;
    problem.mask.set_causal(true);
    expect_all_accurate(random, problem);
    if (rows > columns) continue;
    problem.mask.set_offset(columns - rows);  // bottom-right
    expect_all_accurate(random, problem);
  }
}

TEST_F(CudaSdpaBackward, OtherHeadDimensions) {
  Random random(203);
  for (const std::int64_t dim : {8, 40, 80, 96, 200}) {
    expect_accurate(WholeGradients(random, causal_half_problem({2, 150, 170, 2, 1, dim, dim})));
  }
}

TEST_F(CudaSdpaBackward, Windows) {
  Random random(204);
  for (const auto& [left, right] : {std::pair{100, 0}, std::pair{100, 70}, std::pair{-1, 50},
                                    std::pair{0, 0}, std::pair{130, -1}}) {
    for (const std::int64_t columns : {256, 320}) {
      AttentionProblem problem = half_problem({1, 192, columns, 2, 1, 0, 0});
      problem.mask.set_window(left, right);
      problem.mask.set_offset(left > 40 ? 40 : 0);
      expect_all_accurate(random, problem);
    }
  }
}

TEST_F(CudaSdpaBackward, LengthsOfBatches) {
  Random random(205);
  for (const bool causal : {false, true}) {
    for (const std::int64_t columns : {384, 300}) {
      AttentionProblem problem = half_problem({7, 300, columns, 4, 2, 0, 0});
      problem.mask.set_causal(causal);
      problem.mask.set_query_lengths({300, 70, 130, 0, 1, 256, 300});
      problem.mask.set_kv_lengths({129, 0, 192, 300, 64, 1, 300});
      expect_all_accurate(random, problem);
    }
  }
  AttentionProblem window = half_problem({4, 256, 256, 4, 2, 0, 0});
  window.mask.set_window(100, 10);
  window.mask.set_kv_lengths({256, 64, 192, 0});
  expect_all_accurate(random, window);
}

// Their columns that fill the last tile must be hidden; the LSE is below −88.7.
TEST_F(CudaSdpaBackward, StronglyNegativeLogits) {
  Random random(206);
  for (const std::int64_t columns : {64, 100, 192, 256, 320}) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{256, 256}, std::pair{192, 128}}) {
      for (const int mask : {0, 1, 2, 3}) {
        AttentionProblem problem = half_problem({2, 130, columns, 2, 1, dim, value_dim});
        problem.mask.set_causal(mask == 1);
        if (mask == 2) problem.mask.set_window(-1, 50);
        if (mask == 3) problem.mask.set_kv_lengths({static_cast<std::int32_t>(columns), 64});
        problem.scale = 60.0 / static_cast<double>(dim);
        WholeAttention forward = random_operands(random, problem);
        make_strongly_negative(forward);
        const WholeGradients whole(random, std::move(forward));
        const std::vector<float> lse = floats_of(whole.lse);
        EXPECT_LT(*std::max_element(lse.begin(), lse.end()), -150);
        expect_accurate(whole);
      }
    }
  }
}

// Blocks of a ring: zigzag chunks, chunks that are not whole tiles, and striped shards.
TEST_F(CudaSdpaBackward, BlocksAddUp) {
  Random random(207);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::int64_t chunk : {64, 75}) {
      AttentionProblem problem = causal_half_problem({2, 4 * chunk, 4 * chunk, 4, 2, dim, dim});
      problem.mask.set_kv_lengths(
          {static_cast<std::int32_t>(4 * chunk), static_cast<std::int32_t>(4 * chunk - 50)});
      const WholeGradients whole(random, problem);
      std::vector<GradientPart> parts;
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t row = 0; row < 4; ++row) {
          for (std::int64_t column = 0; column <= row; ++column) {
            parts.push_back(part_of(whole, b, {row * chunk, chunk}, {column * chunk, chunk}));
          }
        }
      }
      add(whole, parts);
      EXPECT_LT(whole.largest_share(), 1) << dim << ", chunks of " << chunk;
    }
  }
  const WholeGradients whole(random, causal_half_problem({1, 300, 300, 4, 1, 128, 128}));
  std::vector<GradientPart> parts;
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t column = 0; column < 3; ++column) {
      if (column <= row) {
        parts.push_back(part_of(whole, 0, {row, 100, 3}, {column, 100, 3}));
      } else {  // the first row sees nothing
        parts.push_back(part_of(whole, 0, {row + 3, 99, 3}, {column, 99, 3}));
      }
    }
  }
  add(whole, parts);
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaSdpaBackward, UnmaskedBlocksSeeEverything) {
  Random random(208);
  expect_unmasked_sees_everything(random, half_problem({1, 200, 200, 2, 1, 64, 64}));
}

// Rows without weights anywhere, whatever their dO and delta.
TEST_F(CudaSdpaBackward, RowsWithoutLseAddNothing) {
  Random random(209);
  for (const bool all : {true, false}) {
    AttentionProblem problem = half_problem({1, 200, 192, 4, 2, 128, 128});
    if (!all) problem.mask.set_query_lengths({130});
    const WholeGradients whole(random, problem);
    for (std::int64_t t = all ? 0 : 130; t < 200; ++t) {
      fill(whole.grad_output, t, std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t n = 0; n < 4; ++n) {
        whole.lse.view().at<float>({0, n, t}) = -std::numeric_limits<float>::infinity();
        whole.delta.view().at<float>({0, n, t}) = std::numeric_limits<float>::quiet_NaN();
      }
    }
    add(whole);
    if (!all) {
      EXPECT_LT(whole.largest_share(), 0.8);
      continue;
    }
    for (const float gradient : floats_of(whole)) ASSERT_EQ(gradient, 0);
  }
}

TEST_F(CudaSdpaBackward, GradientsThatAreNotWantedStay) {
  Random random(210);
  const AttentionProblem problem = causal_half_problem({1, 200, 200, 4, 2, 64, 64});
  expect_gradients_one_by_one(WholeGradients(random, problem));
}

// dO of any magnitude, in every row: squares of its entries may neither vanish nor overflow.
TEST_F(CudaSdpaBackward, OutputGradientsOfAnyMagnitude) {
  Random random(211);
  for (const auto& [dtype, magnitude] :
       {std::pair{DType::bfloat16, 0x1p-80F}, std::pair{DType::bfloat16, 0x1p70F},
        std::pair{DType::float16, 0x1p-6F}, std::pair{DType::float16, 0x1p6F}}) {
    WholeGradients whole(random, problem_of({1, 128, 256, 4, 2, 64, 64}, dtype));
    // The oracle's gradients are linear in dO.
    multiply(whole.grad_output, magnitude);
    multiply(whole.delta, magnitude);
    for (OracleGradient* truth : {&whole.truth.query, &whole.truth.key, &whole.truth.value}) {
      for (double& value : truth->values) value *= magnitude;
      for (double& value : truth->magnitudes) value *= magnitude;
    }
    expect_accurate(whole);
  }
}

TEST_F(CudaSdpaBackward, NothingToCompute) {
  expect_nothing_to_compute();
}

TEST_F(CudaSdpaBackward, RefusesLayoutsThatItCannotRead) {
  Random random(213);
  const WholeGradients whole(random, half_problem({1, 64, 64, 2, 1, 64, 64}));
  const std::unique_ptr<Kernel> kernel = sdpa().make_kernel(whole.forward.problem, *device_);
  const auto message = [&](const BackwardBlock& block) {
    return message_of<UnsupportedError>(
        [&] { kernel->prepare_backward(block, whole.gradients()); });
  };
  const auto shifted = [](const ConstTensorView& view) {
    return ConstTensorView(static_cast<const std::byte*>(view.data()) + 2, view.dtype(),
                           view.shape(), view.strides(), view.place());
  };
  BackwardBlock block = whole.block();
  block.grad_output = shifted(block.grad_output);
  EXPECT_THAT(message(block), HasSubstr("the output's gradient does not begin"));
  block = whole.block();
  block.query = shifted(block.query);
  EXPECT_THAT(message(block), HasSubstr("query does not begin"));
}

// No device needed from here on.

TEST(SdpaGradients, AreDeclaredApart) {
  const BackwardDeclaration& declares = sdpa().declares().backward.value();
  EXPECT_FALSE(declares.repeats_bits);
  EXPECT_FALSE(declares.takes_grad_lse);
  EXPECT_TRUE(declares.rounds);
  const Place place = Place::cuda(0);
  AttentionProblem problem = half_problem({1, 8, 8, 2, 1, 192, 128});
  EXPECT_TRUE(sdpa().fits_backward(problem, place));
  problem.dropout.emplace(0.1, 3);
  EXPECT_THAT(sdpa().fits_backward(problem, place).reason(), HasSubstr("dropout"));
  problem.dropout.reset();
  problem.shape.head_dim = 264;
  EXPECT_THAT(sdpa().fits_backward(problem, place).reason(), HasSubstr("264"));
}

TEST(SdpaGradients, RefuseBlocksWithTheReason) {
  const auto reason = [](const Mask& mask, std::int64_t rows, std::int64_t columns) {
    const MaskedBlock one(mask, 1, rows, columns);
    return sdpa().takes_backward(one.problem, one.block).reason();
  };
  EXPECT_EQ(reason({}, 16, 16), "");
  EXPECT_EQ(reason({}, 1, 16), "");
  EXPECT_THAT(reason({}, 1, 1), HasSubstr("single row and column"));
  Mask causal;
  causal.set_causal(true);
  EXPECT_EQ(reason(causal, 16, 16), "");
  EXPECT_THAT(reason(causal, 1, 16), HasSubstr("single row"));
  causal.set_offset(-1);
  EXPECT_THAT(reason(causal, 16, 16), HasSubstr("see nothing"));
  Mask window;
  window.set_window(3, 3);
  EXPECT_THAT(reason(window, 16, 15), HasSubstr("more rows than columns"));
}

}  // namespace
}  // namespace annulus::test
