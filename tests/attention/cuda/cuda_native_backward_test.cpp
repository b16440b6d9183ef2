// Gradients of the native kernel on a GPU, against the oracle's.
#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/attention/score_cases.hpp"

namespace annulus::test {
namespace {

constexpr std::array kDTypes{DType::float32, DType::float16, DType::bfloat16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CudaNativeBackward : public CudaTest {
 protected:
  /// Adds to gradients in host memory.
  void add(const AttentionProblem& problem, BackwardBlock block, const Gradients& gradients) {
    std::vector<std::unique_ptr<ViewMirror>> mirrors;
    const auto there = [&](const ConstTensorView& view) {
      mirrors.push_back(std::make_unique<ViewMirror>(view, *device_));
      return mirrors.back()->view();
    };
    for (ConstTensorView* view :
         {&block.query, &block.key, &block.value, &block.grad_output, &block.lse, &block.delta}) {
      *view = there(*view);
    }
    if (block.scores.bias) block.scores.bias = there(*block.scores.bias);
    if (block.scores.mask) block.scores.mask = there(*block.scores.mask);
    Gradients sums;
    std::vector<std::pair<TensorView, const ViewMirror*>> results;
    const auto added = [&](TensorView& sum, const TensorView& host) {
      if (host.rank() == 0) return;
      sum = there(host);
      results.emplace_back(host, mirrors.back().get());
    };
    added(sums.query, gradients.query);
    added(sums.key, gradients.key);
    added(sums.value, gradients.value);
    added(sums.bias, gradients.bias);
    const std::unique_ptr<Kernel> kernel = native().make_kernel(problem, *device_);
    kernel->prepare_backward(block, sums);
    kernel->backward(block, sums, {*stream_, nullptr, 1});
    stream_->synchronize();
    for (const auto& [host, mirror] : results) mirror->download(host);
  }
  void add(const WholeGradients& whole) {
    add(whole.forward.problem, whole.block(), whole.gradients());
  }

  [[nodiscard]] AddGradients gradients() {
    return [this](const WholeGradients& whole, const BackwardBlock& block,
                  const Gradients& gradients) { add(whole.forward.problem, block, gradients); };
  }
  std::vector<float> run(const WholeGradients& whole, const BackwardBlock& block) {
    return test::run(gradients(), whole, block);
  }

  void expect_right(const WholeGradients& whole) {
    const AttentionProblem& problem = whole.forward.problem;
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask));
    add(whole);
    EXPECT_LT(whole.largest_share(), 0.5);
  }
};

TEST_F(CudaNativeBackward, EveryMaskAloneAndInPairs) {
  Random random(81);
  std::size_t i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    AttentionProblem problem = problem_of({2, 43, 75, 4, 2, 5, 6}, kDTypes.at(i++ % 3));
    problem.mask = random_mask(random, kinds, 2, 43, 75);
    if (i % 2 == 0) problem.sinks = Sinks::random(4, 1, i);  // rows of padding have an LSE, too
    expect_right(WholeGradients(random, problem));
  }
}

TEST_F(CudaNativeBackward, BlockMasks) {
  Random random(82);
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    AttentionProblem problem = problem_of({2, 43, 75, 4, 2, 3, 4});
    problem.mask = random_mask(random, kinds, 2, 43, 75);
    problem.mask.set_block_mask(random_block_mask(random, 2, 4, 43, 75, 30));
    expect_right(WholeGradients(random, problem));
  }
}

TEST_F(CudaNativeBackward, EveryModifier) {
  expect_right_modifiers({2, 37, 70, 6, 3, 8, 4}, gradients());
}

TEST_F(CudaNativeBackward, HeadDimensions) {
  Random random(84);
  for (const DType dtype : kDTypes) {
    for (const auto& [dim, value_dim] :
         {std::pair{1, 1}, std::pair{40, 40}, std::pair{64, 64}, std::pair{128, 128},
          std::pair{192, 128}, std::pair{576, 512}, std::pair{576, 576}}) {
      AttentionProblem problem = problem_of({1, 35, 67, 4, 2, dim, value_dim}, dtype);
      problem.mask.set_causal(true);
      problem.mask.set_offset(30);
      expect_right(WholeGradients(random, problem));
    }
    // More than fits in shared memory for several warps.
    expect_right(WholeGradients(random, problem_of({1, 3, 34, 2, 1, 2090, 2000}, dtype)));
  }
}

TEST_F(CudaNativeBackward, ManyHeadsInAGroup) {
  Random random(85);
  AttentionProblem problem = problem_of({1, 5, 70, 60, 1, 4, 3});
  problem.mask.set_causal(true);
  problem.mask.set_offset(60);
  expect_right(WholeGradients(random, problem));
}

// Summed over whatever is broadcast; entries that no pair sees hold NaN or infinities.
TEST_F(CudaNativeBackward, GradientsOfEveryBias) {
  Random random(86);
  int i = 0;
  for (const Extents& shape : score_shapes(2, 4, 43, 75)) {
    AttentionProblem problem = problem_of({2, 43, 75, 4, 2, 8, 8});
    problem.bias = shape;
    if (i % 2 == 1) problem.dense_mask = Extents{2, 1, 43, 75};
    if (i % 3 == 1) problem.mask.set_window(20, 5);
    ++i;
    WholeAttention forward = random_operands(random, problem);
    spoil_hidden_bias(forward);
    const WholeGradients whole(random, std::move(forward));
    expect_right(whole);
    BackwardBlock block = whole.block();
    const std::vector<float> by_position = floats_of(whole);
    block.scores.by_column = true;
    EXPECT_TRUE(same_bits(run(whole, block), by_position));
  }
}

// A sum of 120000 terms of one entry is as accurate as others.
TEST_F(CudaNativeBackward, ABiasOfOneEntry) {
  Random random(87);
  AttentionProblem problem = problem_of({2, 300, 100, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 1, 1};
  problem.sinks = Sinks::random(2, 1, 3);
  expect_right(WholeGradients(random, problem));
}

TEST_F(CudaNativeBackward, BlocksAddUp) {
  expect_blocks_add_up(gradients());
}

// Batch by batch and key/value head by key/value head.
TEST_F(CudaNativeBackward, PartsOfTheBatchAndOfTheHeads) {
  Random random(97);
  for (const bool per_batch : {false, true}) {
    AttentionProblem problem = problem_of({3, 40, 50, 4, 2, 8, 8});
    if (per_batch) {
      problem.mask.set_causal(true);
      problem.mask.set_offsets({5, 30, -10});
      problem.mask.set_prefixes({0, 7, 20});
    } else {
      problem.mask = random_mask(random, {MaskKind::segments}, 3, 40, 50);
    }
    problem.mask.set_kv_lengths({50, 30, 45});
    problem.mask.set_query_lengths({25, 40, 39});
    problem.mask.set_block_mask(BlockMask::random(40, 50, 4, 0.7, 1, {16, 16}));
    problem.sinks = Sinks::random(4, 1, 3);
    problem.dropout.emplace(0.2, 4);
    const WholeGradients whole(random, problem);
    for (std::int64_t b = 0; b < 3; ++b) {
      for (std::int64_t k = 0; k < 2; ++k) {
        const auto of_head = [&](const auto& view) {
          return view.slice(0, b, 1).slice(2, 2 * k, 2);
        };
        const auto of_kv_head = [&](const auto& view) {
          return view.slice(0, b, 1).slice(2, k, 1);
        };
        const auto of_lse = [&](const auto& view) {
          return view.slice(0, b, 1).slice(1, 2 * k, 2);
        };
        BackwardBlock block = whole.block();
        block.first_batch = b;
        block.first_head = 2 * k;
        block.query = of_head(block.query);
        block.grad_output = of_head(block.grad_output);
        block.key = of_kv_head(block.key);
        block.value = of_kv_head(block.value);
        block.lse = of_lse(block.lse);
        block.delta = of_lse(block.delta);
        Gradients gradients = whole.gradients();
        gradients.query = of_head(gradients.query);
        gradients.key = of_kv_head(gradients.key);
        gradients.value = of_kv_head(gradients.value);
        add(problem, block, gradients);
      }
    }
    EXPECT_LT(whole.largest_share(), 0.5);
  }
}

// More ranges than one launch takes, of rows and of columns.
TEST_F(CudaNativeBackward, ManyRanges) {
  Random random(88);
  AttentionProblem problem = problem_of({2, 100, 150, 4, 2, 8, 8});
  problem.mask.set_window(60, 60);
  problem.mask.set_kv_lengths({150, 140});
  problem.dropout.emplace(0.2, 4);
  problem.dense_mask = Extents{2, 1, 100, 150};
  for (const Extents& bias :
       {Extents{1, 4, 100, 150}, Extents{2, 1, 1, 150}, Extents{1, 1, 100, 1}}) {
    problem.bias = bias;
    const WholeGradients whole(random, problem);
    const auto ranges_of = [](std::int64_t length, std::int64_t each) {
      std::vector<PositionRange> ranges;
      for (std::int64_t i = 0; i < length; i += each) {
        ranges.push_back({GlobalPosition(i), std::min(each, length - i)});
      }
      return PositionRanges(ranges);
    };
    BackwardBlock block = whole.block();
    block.rows = ranges_of(100, 2);
    block.columns = ranges_of(150, 5);
    ASSERT_EQ(block.rows.ranges().size(), 50U);
    ASSERT_EQ(block.columns.ranges().size(), 30U);
    add(problem, block, whole.gradients());
    EXPECT_LT(whole.largest_share(), 0.5);
  }
}

TEST_F(CudaNativeBackward, UnmaskedBlocksSkipTheMask) {
  Random random(89);
  WholeGradients whole(random, problem_of({1, 50, 70, 2, 1, 8, 8}));
  whole.forward.problem.mask.set_causal(true);
  whole.forward.problem.mask.set_kv_lengths({3});
  BackwardBlock block = whole.block();
  block.unmasked = true;
  add(whole.forward.problem, block, whole.gradients());
  EXPECT_LT(whole.largest_share(), 0.5);
}

TEST_F(CudaNativeBackward, AddsToWhatIsThereAndWritesNothingElse) {
  Random random(90);
  AttentionProblem problem = problem_of({1, 40, 70, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 40, 70};
  const WholeGradients whole(random, problem);
  const Gradients all = whole.gradients();
  add(whole);
  const std::vector<float> once = floats_of(whole);
  std::size_t begin = 0;
  for (const int wanted : {0, 1, 2, 3}) {
    whole.clear();
    Gradients one;
    if (wanted == 0) one.query = all.query;
    if (wanted == 1) one.key = all.key;
    if (wanted == 2) one.value = all.value;
    if (wanted == 3) one.bias = all.bias;
    add(problem, whole.block(), one);
    add(problem, whole.block(), one);
    const std::vector<float> twice = floats_of(whole);
    const std::array<const Tensor*, 4> tensors{&whole.query, &whole.key, &whole.value, &whole.bias};
    const auto count =
        static_cast<std::size_t>(tensors.at(static_cast<std::size_t>(wanted))->shape().product());
    for (std::size_t i = 0; i < once.size(); ++i) {
      const bool mine = i >= begin && i < begin + count;
      ASSERT_EQ(twice[i], mine ? 2 * once[i] : 0) << wanted << ' ' << i;
    }
    begin += count;
  }
}

TEST_F(CudaNativeBackward, RunsRepeatEveryBit) {
  Random random(91);
  AttentionProblem problem = problem_of({2, 200, 300, 4, 2, 32, 32}, DType::bfloat16);
  problem.mask.set_causal(true);
  problem.mask.set_offset(100);
  problem.dropout.emplace(0.1, 5);
  problem.bias = Extents{1, 4, 1, 300};
  const WholeGradients whole(random, problem);
  const std::vector<float> first = run(whole, whole.block());
  EXPECT_TRUE(same_bits(run(whole, whole.block()), first));
}

TEST_F(CudaNativeBackward, WhatIsNotFiniteReachesWhatSeesIt) {
  expect_reach_of_non_finite(120, gradients());
}

TEST_F(CudaNativeBackward, HiddenValuesReachNothing) {
  for (const DType dtype : kDTypes)
    expect_nothing_of_hidden_values(100, 16, 16, dtype, gradients(), 0.5);
}

TEST_F(CudaNativeBackward, RowsWithoutWeightAddNothing) {
  expect_nothing_of_rows_without_weight(70, gradients());
}

// Rows that see keys, of which all or some have logits of −∞.
TEST_F(CudaNativeBackward, LogitsOfMinusInfinity) {
  Random random(98);
  const WholeGradients whole(random, weightless_attention());
  add(whole);
  expect_same_reach(whole);
}

TEST_F(CudaNativeBackward, ABiasOfMinusInfinityHides) {
  Random random(99);
  AttentionProblem problem = problem_of({1, 40, 70, 2, 1, 8, 8});
  problem.bias = Extents{1, 1, 1, 70};
  WholeAttention forward = random_attention(random, problem);
  for (std::int64_t j = 33; j < 50; ++j) {
    forward.bias.view().at<float>({0, 0, 0, j}) = -kInfinity;
    fill(forward.key, j, kNan);
    fill(forward.value, j, kNan);
  }
  const WholeGradients whole(random, std::move(forward));
  add(whole);
  EXPECT_LT(whole.largest_share(), 0.5);
}

TEST_F(CudaNativeBackward, NothingToCompute) {
  Random random(95);
  for (const AttentionShape& shape :
       {AttentionShape{1, 0, 12, 2, 1, 8, 8}, AttentionShape{1, 12, 0, 2, 1, 8, 8},
        AttentionShape{0, 12, 12, 2, 1, 8, 8}}) {
    const WholeGradients whole(random, problem_of(shape));
    add(whole);
    for (const float x : floats_of(whole)) ASSERT_EQ(x, 0);
  }
}

TEST_F(CudaNativeBackward, RefusesWhatDoesNotFit) {
  Random random(96);
  const WholeGradients whole(random, problem_of({1, 9, 9, 2, 1, 4, 4}));
  const AttentionProblem& problem = whole.forward.problem;
  BackwardBlock block = whole.block();
  block.grad_output = block.grad_output.slice(1, 0, 8);
  EXPECT_THROW(add(problem, block, whole.gradients()), InternalError);
  block = whole.block();
  const Tensor half(DType::bfloat16, whole.grad_output.shape(), test_memory());
  block.grad_output = half.view();
  EXPECT_THROW(add(problem, block, whole.gradients()), InternalError);
  Gradients gradients = whole.gradients();
  gradients.bias = gradients.query;
  EXPECT_THROW(add(problem, whole.block(), gradients), InternalError);
}

}  // namespace
}  // namespace annulus::test
