// Gradients of flash attention on the device with dropout, bias and dense mask.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include <annulus/attention/philox.hpp>
#include <annulus/core/error.hpp>

#include "cuda/upload.hpp"
#include "tests/attention/flash/cuda_flash_backward.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::span<const Dims> kNarrowDims = kHalfDims.first(2);
constexpr std::uint64_t kSeed = (std::uint64_t{3} << 40U) + 5;

TEST_F(CudaFlashBackward, Dropout) {
  Random random(51);
  AttentionProblem problem = half_problem({2, 200, 300, 4, 2, 0, 0});
  for (const double probability : {0.1, 0.7}) {
    problem.dropout.emplace(probability, kSeed);
    expect_half_accurate(random, problem);
  }
  problem.mask.set_causal(true);
  problem.mask.set_offset(90);
  expect_half_accurate(random, problem);
  problem.soft_cap = 2.0;
  expect_half_accurate(random, problem);
  repeats_bits_ = true;
  expect_half_accurate(random, problem);
  problem.soft_cap.reset();
  expect_half_accurate(random, problem);
}

TEST_F(CudaFlashBackward, DropoutOfOddLengths) {
  Random random(52);
  for (const auto& [rows, columns] : {std::pair{133, 221}, {1, 130}, {300, 1}, {127, 129}}) {
    AttentionProblem problem = half_problem({1, rows, columns, 2, 1, 0, 0});
    problem.dropout.emplace(0.3, kSeed);
    expect_half_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackward, DropoutUnderEveryMask) {
  Random random(53);
  unsigned i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    const Dims& dims = kHalfDims[i % kHalfDims.size()];
    AttentionProblem problem = half_problem({2, 150, 210, 2, 1, dims.head, dims.value});
    if (i % 3 == 0) problem.dtype = DType::float16;
    problem.mask = random_mask(random, kinds, 2, 150, 210);
    problem.dropout.emplace(0.2, i);
    expect_accurate(random, problem);
    ++i;
  }
}

// Blocks whose positions begin anywhere or have strides, so that their keys are not always
// neighbours from a multiple of 32 on.
TEST_F(CudaFlashBackward, DropoutOfBlocks) {
  for (const Dims& dims : kHalfDims) {
    expect_blocks_add_up(dims, Dropout(0.3, kSeed));
  }
}

// Dropout counts heads and batches from the first of the problem, not of the block.
TEST_F(CudaFlashBackward, DropoutOfPartsOfTheHeads) {
  Random random(54);
  AttentionProblem problem = half_problem({2, 150, 260, 6, 3, 64, 64});
  problem.dropout.emplace(0.3, kSeed);
  const WholeGradients whole(random, problem);
  std::vector<GradientPart> parts;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t k = 0; k < 3; ++k) {
      GradientPart part = part_of(whole, b, {0, 150}, {0, 260});
      part.block.first_head = 2 * k;
      for (ConstTensorView* view : {&part.block.query, &part.block.grad_output}) {
        *view = view->slice(2, 2 * k, 2);
      }
      for (ConstTensorView* view : {&part.block.lse, &part.block.delta}) {
        *view = view->slice(1, 2 * k, 2);
      }
      for (ConstTensorView* view : {&part.block.key, &part.block.value}) {
        *view = view->slice(2, k, 1);
      }
      part.gradients = {part.gradients.query.slice(2, 2 * k, 2), part.gradients.key.slice(2, k, 1),
                        part.gradients.value.slice(2, k, 1)};
      parts.push_back(part);
    }
  }
  add(whole, parts);
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, DropoutOfUnmaskedBlocks) {
  Random random(55);
  AttentionProblem problem = half_problem({1, 200, 200, 2, 1, 128, 128});
  problem.dropout.emplace(0.3, kSeed);
  WholeGradients whole(random, problem);
  whole.forward.problem.mask.set_causal(true);
  BackwardBlock block = whole.block();
  block.unmasked = true;
  add(whole, {{block, whole.gradients()}});
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, SeedsInDeviceMemory) {
  Random random(56);
  AttentionProblem problem = half_problem({1, 200, 200, 2, 1, 128, 128});
  problem.dropout.emplace(0.3, kSeed);
  const WholeGradients whole(random, problem);
  problem.dropout.emplace(0.3, 1);
  problem.call_arguments.dropout_seed = true;
  std::vector<std::int32_t> words;
  for (const std::uint32_t word : philox_key(kSeed)) {
    words.push_back(static_cast<std::int32_t>(word));
  }
  const Tensor key = upload(words, device_->memory());
  BackwardBlock block = whole.block();
  block.call_arguments.dropout_key = static_cast<const std::uint32_t*>(key.view().data());
  add_block(problem, block, whole.gradients());
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, DropoutOfValuesThatAreNotFinite) {
  Random random(57);
  for (const Dims& dims : kHalfDims) {
    AttentionProblem problem = half_problem({1, 400, 400, 2, 1, dims.head, dims.value});
    problem.mask.set_window(30, 10);
    problem.dropout.emplace(0.3, kSeed);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.key, 100, kNan);
    fill(forward.value, 300, kNan, 3);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
  }
}

// A dropped NaN stays NaN: where nothing is masked, kernels multiply whole tiles.
TEST_F(CudaFlashBackward, DropoutOfWeightsThatAreNotFinite) {
  Random random(59);
  for (const Dims& dims : kHalfDims) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
      AttentionProblem problem = problem_of({1, 300, 300, 2, 2, dims.head, dims.value}, dtype);
      problem.dropout.emplace(0.5, kSeed);
      WholeAttention forward = random_operands(random, problem);
      from_float32(&kNan, dtype, forward.query.view().address({0, 100, 0, 3}), 1);
      const WholeGradients whole(random, std::move(forward));
      add(whole);
      expect_same_reach(whole);
    }
  }
}

// More blocks than run at a time, with dropout and with lists alone.
TEST_F(CudaFlashBackward, DropoutAndListsRepeatBits) {
  Random random(58);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem = causal_half_problem({3, 200, 1500, 8, 8, dim, dim}, 1200);
    problem.dropout.emplace(0.3, kSeed);
    expect_same_bits(random, problem);
    problem.dropout.reset();
    problem.mask.set_sink_tokens(300);
    problem.mask.set_window(600, -1);
    expect_same_bits(random, problem);
  }
}

/// Has the bias's gradient not computed, but set to the right one.
void skip_bias_gradient(WholeGradients& whole, Gradients& gradients) {
  whole.bias = filled(DType::float32, *whole.forward.problem.bias, whole.truth.bias.values);
  gradients.bias = {};
}

TEST_F(CudaFlashBackward, Biases) {
  Random random(61);
  AttentionProblem problem = half_problem({2, 200, 300, 4, 2, 0, 0});
  problem.bias = Extents{2, 4, 200, 300};
  expect_half_accurate(random, problem);
  problem.mask.set_causal(true);
  problem.mask.set_offset(90);
  problem.scale = 0.3;
  expect_half_accurate(random, problem);
  problem.dropout.emplace(0.3, kSeed);
  repeats_bits_ = true;
  expect_half_accurate(random, problem);
}

TEST_F(CudaFlashBackward, BiasesAndDenseMasksOfOddLengths) {
  Random random(62);
  for (const auto& [rows, columns] :
       {std::pair{133, 221}, {1, 130}, {300, 1}, {127, 129}, {65, 31}, {2, 257}}) {
    AttentionProblem problem = half_problem({2, rows, columns, 2, 1, 0, 0});
    problem.bias = Extents{2, 2, rows, columns};
    expect_half_accurate(random, problem);
    problem.bias.reset();
    problem.dense_mask = Extents{2, 2, rows, columns};
    expect_half_accurate(random, problem);
  }
}

// Hidden entries hold NaN or infinities. Kernels of narrow heads have TMA copy rows of 212 entries,
// not of 210.
TEST_F(CudaFlashBackward, EveryShapeOfBias) {
  Random random(63);
  int i = 0;
  for (const std::int64_t columns : {210, 212}) {
    for (const Extents& shape : score_shapes(2, 4, 150, columns)) {
      const auto cycle = static_cast<std::size_t>(i + i / 4) % kHalfDims.size();
      for (const Dims& dims : columns == 212 ? kNarrowDims : kHalfDims.subspan(cycle, 1)) {
        AttentionProblem problem = half_problem({2, 150, columns, 4, 2, dims.head, dims.value});
        if (i % 3 == 0) problem.dtype = DType::float16;
        problem.bias = shape;
        if (i % 2 == 1) problem.dense_mask = Extents{2, 1, 150, columns};
        if (i % 3 == 1) problem.mask.set_window(20, 5);
        SCOPED_TRACE(to_string(shape));
        WholeAttention forward = random_operands(random, problem);
        spoil_hidden_bias(forward);
        WholeGradients whole(random, std::move(forward));
        Gradients gradients = whole.gradients();
        // Gradients of biases that keys share would be sums over keys, which kernels refuse.
        for (const bool wants_bias : {true, false}) {
          whole.clear();
          if (!wants_bias || shape[3] == 1) skip_bias_gradient(whole, gradients);
          add(whole, {{whole.block(), gradients}});
          EXPECT_LT(whole.largest_share(), 1) << wants_bias;
        }
      }
      ++i;
    }
  }
}

// Kernels of narrow heads have TMA copy rows of 208 entries.
TEST_F(CudaFlashBackward, EveryShapeOfDenseMask) {
  Random random(64);
  int i = 0;
  for (const Extents& shape : score_shapes(2, 4, 150, 208)) {
    const Dims& wide = kHalfDims[static_cast<std::size_t>(2 + (i + i / 4) % 2)];
    for (const Dims& dims : {kNarrowDims[0], kNarrowDims[1], wide}) {
      AttentionProblem problem = half_problem({2, 150, 208, 4, 2, dims.head, dims.value});
      if (i % 3 == 0) problem.dtype = DType::float16;
      if (i % 3 == 1) problem.mask.set_causal(true);
      if (i % 4 == 2) problem.soft_cap = 2.0;
      if (i % 4 == 3) problem.dropout.emplace(0.2, kSeed);
      problem.dense_mask = shape;
      repeats_bits_ = i % 2 == 0;
      SCOPED_TRACE(to_string(shape));
      expect_accurate(random, problem);
    }
    ++i;
  }
}

// Positions that begin anywhere and have strides.
TEST_F(CudaFlashBackward, ScoresOfBlocks) {
  for (const bool has_bias : {true, false}) {
    for (const Dims& dims : kHalfDims) {
      Random random(65);
      AttentionProblem problem = causal_half_problem({2, 320, 320, 4, 2, dims.head, dims.value});
      if (has_bias) problem.bias = Extents{2, 4, 320, 320};
      problem.dense_mask = Extents{1, 4, 320, 320};
      const WholeGradients whole(random, problem);
      std::vector<GradientPart> parts = parts_of(whole);
      for (auto& [block, gradients] : parts) {
        const PositionRange& columns = block.columns.ranges().front();
        if (columns.stride != 1 || block.first_batch == 1) continue;
        // The same scores, indexed by the block's column instead of the key's position.
        block.scores = block.scores.slice(3, columns.start.value(), columns.length);
        block.scores.by_column = true;
        if (has_bias) {
          gradients.bias = gradients.bias.slice(3, columns.start.value(), columns.length);
        }
      }
      add(whole, parts);
      EXPECT_LT(whole.largest_share(), 1) << dims.head << ' ' << has_bias;
    }
  }
}

// A key that a dense mask or a bias hides reaches no result that does not see it.
TEST_F(CudaFlashBackward, ScoresHideValuesThatAreNotFinite) {
  Random random(66);
  for (const bool by_bias : {false, true}) {
    for (const Dims& dims : kHalfDims) {
      // TMA copies rows of 304 entries of either.
      AttentionProblem problem = half_problem({1, 304, 304, 2, 1, dims.head, dims.value});
      (by_bias ? problem.bias : problem.dense_mask) = Extents{1, 1, 304, 304};
      problem.mask.set_window(30, 10);
      problem.dropout.emplace(0.3, kSeed);
      WholeAttention forward = random_operands(random, problem);
      for (std::int64_t row = 0; row < 304; ++row) {
        const bool hides = row % 3 != 0;
        for (const std::int64_t column : {77, 200}) {
          if (by_bias) {
            if (hides) forward.bias.view().at<float>({0, 0, row, column}) = -kInfinity;
          } else {
            forward.mask.view().at<std::uint8_t>({0, 0, row, column}) = hides ? 0 : 1;
          }
        }
      }
      fill(forward.key, 77, kNan);
      fill(forward.value, 200, kInfinity, 3);
      const WholeGradients whole(random, std::move(forward));
      add(whole);
      expect_same_reach(whole);
    }
  }
}

// A tile's rows past the last one read the last one's bias. Memory that held other masks before
// says nothing of them.
TEST_F(CudaFlashBackward, BiasesOfHiddenPairsReachNothing) {
  Random random(69);
  std::vector<std::int32_t> everything;
  for (int i = 0; i < 8192; ++i) everything.push_back(i % 2 == 0 ? 0 : 1 << 28);
  for (const Dims& dims : kHalfDims) {
    AttentionProblem problem = half_problem({1, 150, 260, 2, 1, dims.head, dims.value});
    problem.bias = Extents{1, 2, 150, 260};
    problem.mask.set_kv_lengths({200});
    WholeAttention forward = random_operands(random, problem);
    for (std::int64_t row = 0; row < 150; ++row) {
      for (std::int64_t column = 200; column < 260; ++column) {
        forward.bias.view().at<float>({0, row % 2, row, column}) = kNan;
        forward.bias.view().at<float>({0, 1 - row % 2, row, column}) = kInfinity;
      }
    }
    const WholeGradients whole(random, std::move(forward));
    {
      std::vector<Tensor> spoilt;
      for (std::size_t count = 256; count <= everything.size(); count *= 2) {
        spoilt.push_back(upload(std::span(everything).first(count), device_->memory()));
      }
    }
    add(whole);
    expect_same_reach(whole);
  }
}

// Rows whose logits are all −∞ add nothing, whatever they hold.
TEST_F(CudaFlashBackward, RowsWithoutWeightAddNothing) {
  Random random(67);
  for (const Dims& dims : kHalfDims) {
    AttentionProblem problem = half_problem({1, 150, 260, 2, 1, dims.head, dims.value});
    problem.bias = Extents{1, 2, 150, 260};
    WholeAttention forward = random_operands(random, problem);
    for (std::int64_t j = 0; j < 260; ++j) {
      for (std::int64_t n = 0; n < 2; ++n) {
        forward.bias.view().at<float>({0, n, 7, j}) = -kInfinity;
      }
    }
    fill(forward.query, 7, kNan);
    const WholeGradients whole(random, std::move(forward));
    fill(whole.grad_output, 7, kNan);
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
  }
}

// Rows that attend to the one key whose bias is far above the others.
TEST_F(CudaFlashBackward, LargeBiases) {
  Random random(68);
  for (const float size : {1e3F, 1e30F, 3e38F}) {
    for (const Dims& dims : kHalfDims) {
      AttentionProblem problem = half_problem({1, 130, 300, 2, 1, dims.head, dims.value});
      problem.bias = Extents{1, 1, 130, 300};
      WholeAttention forward = random_operands(random, problem);
      for (std::int64_t row = 0; row < 130; ++row) {
        for (std::int64_t column = 0; column < 300; ++column) {
          const float largest = row % 2 == 0 ? size : -size / 2;
          forward.bias.view().at<float>({0, 0, row, column}) =
              column == 270 - row ? largest : -size;
        }
      }
      const WholeGradients whole(random, std::move(forward));
      add(whole);
      EXPECT_LT(whole.largest_share(), 1) << size;
    }
  }
}

TEST_F(CudaFlashBackward, ScoresRepeatBits) {
  Random random(69);
  for (const Dims& dims : kHalfDims) {
    AttentionProblem problem = half_problem({1, 600, 700, 8, 4, dims.head, dims.value});
    problem.bias = Extents{1, 8, 600, 700};
    problem.dense_mask = Extents{1, 1, 600, 700};
    expect_same_bits(random, problem);
  }
}

TEST_F(CudaFlashBackward, RefusesGradientsOfSharedBiases) {
  Random random(70);
  AttentionProblem problem = half_problem({1, 64, 128, 2, 1, 64, 64});
  const auto refusal = [&](const Extents& shape, bool repeats_bits) {
    problem.bias = shape;
    const WholeGradients whole(random, problem);
    BackwardBlock block = whole.block();
    block.repeats_bits = repeats_bits;
    const std::unique_ptr<Kernel> kernel = flash().make_kernel(problem, *device_);
    return message_of<UnsupportedError>(
        [&] { kernel->prepare_backward(block, whole.gradients()); });
  };
  EXPECT_THAT(refusal({1, 2, 64, 1}, false), HasSubstr("a sum over keys"));
  EXPECT_THAT(refusal({1, 2, 1, 128}, true), HasSubstr("a sum over batches, heads or rows"));
  EXPECT_THAT(refusal({1, 1, 64, 128}, true), HasSubstr("a sum over batches, heads or rows"));
}

}  // namespace
}  // namespace annulus::test
