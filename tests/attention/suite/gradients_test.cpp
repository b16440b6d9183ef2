// Gradients of every implementation against the oracle's.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <annulus/core/error.hpp>

#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/attention/suite/backend.hpp"

namespace annulus::test {
namespace {

class Backward : public BackendTest {
 protected:
  /// Adds to gradients in host memory.
  void add(const AttentionProblem& problem, const BackwardBlock& block,
           const Gradients& gradients) {
    ASSERT_EQ(implementation().fits_backward(problem, device_->place()).reason(), "");
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    backward_on(*device_, *stream_, *kernel, block, gradients, 2);
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
    SCOPED_TRACE(describe(whole.forward.problem));
    add(whole);
    EXPECT_LT(whole.largest_share(), 0.5);
  }
  [[nodiscard]] static std::int64_t rows(std::int64_t most) {
    return std::min(backend().gradient_rows, most);
  }
  [[nodiscard]] static std::int64_t columns(std::int64_t most) {
    return std::min(backend().gradient_columns, most);
  }
};

TEST_P(Backward, EveryMask) {
  Random random(81);
  std::size_t i = 0;
  const auto check = [&](const std::vector<MaskKind>& kinds, std::int64_t t, std::int64_t s) {
    for (const bool blocks : {false, true}) {
      AttentionProblem problem =
          test::problem_of({2, t, s, 4, 2, 5, 6}, backend().dtypes[i++ % backend().dtypes.size()]);
      problem.mask = random_mask(random, kinds, 2, t, s);
      if (blocks) problem.mask.set_block_mask(random_block_mask(random, 2, 4, t, s, s / 3));
      if (i % 2 == 0) problem.sinks = Sinks::random(4, 1, i);  // rows of padding have an LSE, too
      expect_right(WholeGradients(random, problem));
    }
  };
  for (const auto& kinds : kinds_beside_blocks()) check(kinds, rows(277), columns(531));
  for (const auto& kinds : position_combinations()) check(kinds, rows(41), columns(67));
}

TEST_P(Backward, EveryModifier) {
  std::vector<DType> dtypes = backend().dtypes;
  AttentionProblem wide;
  wide.dtype = DType::float64;
  if (implementation().fits_backward(wide, device_->place())) dtypes.push_back(DType::float64);
  expect_right_modifiers({2, rows(53), columns(275), 6, 3, 8, 4}, gradients(), dtypes);
}

TEST_P(Backward, HeadDimensions) {
  Random random(84);
  for (const DType dtype : backend().dtypes) {
    for (const auto& [dim, value_dim] :
         std::vector<HeadDims>{{1, 1}, {40, 40}, {64, 64}, {128, 128}, {192, 128}, {576, 512}}) {
      AttentionProblem problem =
          test::causal_problem_of({1, 35, 67, 4, 2, dim, value_dim}, dtype, 30);
      expect_right(WholeGradients(random, problem));
    }
    // More than fits in shared memory for several warps.
    expect_right(WholeGradients(random, test::problem_of({1, 3, 34, 2, 1, 2090, 2000}, dtype)));
  }
}

// More heads in a group than a tile has rows.
TEST_P(Backward, ManyHeadsInAGroup) {
  Random random(85);
  AttentionProblem problem =
      test::causal_problem_of({1, 5, 263, 300, 1, 4, 3}, DType::float32, 255);
  expect_right(WholeGradients(random, problem));
}

TEST_P(Backward, AScaleOfZero) {
  Random random(65);
  AttentionProblem problem = test::problem_of({1, 30, 300, 2, 1, 4, 4});
  problem.scale = 0.0;
  const WholeGradients whole(random, problem);
  expect_right(whole);
  for (const float entry : floats_of(whole.key)) EXPECT_EQ(entry, 0);
}

// Summed over whatever is broadcast; entries that no pair sees hold NaN or infinities.
TEST_P(Backward, GradientsOfEveryBias) {
  Random random(86);
  int i = 0;
  for (const Extents& shape : score_shapes(2, 4, 43, 75)) {
    AttentionProblem problem = test::problem_of({2, 43, 75, 4, 2, 8, 8});
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

// Without a dense mask, also in tiles that the mask hides in part.
TEST_P(Backward, ABiasUnderEveryMask) {
  Random random(94);
  std::size_t i = 0;
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    const std::int64_t t = rows(150), s = columns(300);
    AttentionProblem problem =
        test::problem_of({2, t, s, 4, 2, 5, 6}, backend().dtypes[i++ % backend().dtypes.size()]);
    problem.mask = random_mask(random, kinds, 2, t, s);
    problem.bias = Extents{2, 4, t, s};
    expect_right(WholeGradients(random, problem));
  }
}

// A sum of 120000 terms of one entry is as accurate as others.
TEST_P(Backward, ABiasOfOneEntry) {
  Random random(87);
  AttentionProblem problem = test::problem_of({2, 300, 100, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 1, 1};
  problem.sinks = Sinks::random(2, 1, 3);
  expect_right(WholeGradients(random, problem));
}

TEST_P(Backward, BlocksAddUp) {
  expect_blocks_add_up(gradients());
}

// Batch by batch and key/value head by key/value head.
TEST_P(Backward, PartsOfTheBatchAndOfTheHeads) {
  Random random(97);
  for (const bool per_batch : {false, true}) {
    AttentionProblem problem = test::problem_of({3, 40, 50, 4, 2, 8, 8});
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
TEST_P(Backward, ManyRanges) {
  Random random(88);
  AttentionProblem problem = test::problem_of({2, 100, 150, 4, 2, 8, 8});
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

TEST_P(Backward, UnmaskedBlocksSkipTheMask) {
  Random random(89);
  WholeGradients whole(random, test::problem_of({1, 50, 70, 2, 1, 8, 8}));
  if (backend().skips_masks) {
    whole.forward.problem.mask.set_causal(true);
    whole.forward.problem.mask.set_kv_lengths({3});
  }
  BackwardBlock block = whole.block();
  block.unmasked = true;
  add(whole.forward.problem, block, whole.gradients());
  EXPECT_LT(whole.largest_share(), 0.5);
}

TEST_P(Backward, AddsToWhatIsThereAndWritesNothingElse) {
  Random random(90);
  AttentionProblem problem = test::problem_of({1, 40, 70, 2, 1, 4, 4});
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
      const float rounding = mine ? 1e-5F * (1 + std::abs(once[i])) : 0;
      ASSERT_NEAR(twice[i], mine ? 2 * once[i] : 0, rounding) << wanted << ' ' << i;
    }
    begin += count;
  }
}

TEST_P(Backward, RunsRepeatEveryBit) {
  Random random(91);
  AttentionProblem problem = test::causal_half_problem({2, 200, 300, 4, 2, 32, 32}, 100);
  problem.dropout.emplace(0.1, 5);
  problem.bias = Extents{1, 4, 1, 300};
  const WholeGradients whole(random, problem);
  const std::vector<float> first = run(whole, whole.block());
  EXPECT_TRUE(same_bits(run(whole, whole.block()), first));
}

TEST_P(Backward, WhatIsNotFiniteReachesWhatSeesIt) {
  expect_reach_of_non_finite(columns(300), gradients());
}

TEST_P(Backward, HiddenValuesReachNothing) {
  for (const DType dtype : backend().dtypes) {
    expect_nothing_of_hidden_values(100, 16, 16, dtype, gradients(), 0.5);
  }
}

TEST_P(Backward, RowsWithoutWeightAddNothing) {
  expect_nothing_of_rows_without_weight(columns(275), gradients());
}

// Rows that see keys, of which all or some have logits of −∞.
TEST_P(Backward, LogitsOfMinusInfinity) {
  Random random(98);
  const WholeGradients whole(random, weightless_attention());
  add(whole);
  expect_same_reach(whole);
}

TEST_P(Backward, ABiasOfMinusInfinityHides) {
  Random random(99);
  AttentionProblem problem = test::problem_of({1, 40, 70, 2, 1, 8, 8});
  problem.bias = Extents{1, 1, 1, 70};
  WholeAttention forward = random_attention(random, problem);
  for (std::int64_t j = 33; j < 50; ++j) {
    forward.bias.view().at<float>({0, 0, 0, j}) = -std::numeric_limits<float>::infinity();
    fill(forward.key, j, std::numeric_limits<float>::quiet_NaN());
    fill(forward.value, j, std::numeric_limits<float>::quiet_NaN());
  }
  const WholeGradients whole(random, std::move(forward));
  add(whole);
  EXPECT_LT(whole.largest_share(), 0.5);
}

TEST_P(Backward, NothingToCompute) {
  Random random(95);
  for (const AttentionShape& shape :
       {AttentionShape{1, 0, 12, 2, 1, 8, 8}, AttentionShape{1, 12, 0, 2, 1, 8, 8},
        AttentionShape{0, 12, 12, 2, 1, 8, 8}}) {
    const WholeGradients whole(random, test::problem_of(shape));
    add(whole);
    for (const float x : floats_of(whole)) ASSERT_EQ(x, 0);
  }
}

TEST_P(Backward, RefusesWhatDoesNotFit) {
  if (backend().name == "vanilla") GTEST_SKIP() << "vanilla does not check what planners give it";
  Random random(96);
  const WholeGradients whole(random, test::problem_of({1, 9, 9, 2, 1, 4, 4}));
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

std::vector<Backend> with_gradients() {
  std::vector<Backend> all = backends();
  std::erase_if(all, [](const Backend& one) { return one.gradient_rows == 0; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Suite, Backward, ::testing::ValuesIn(with_gradients()), name_of_backend);

}  // namespace
}  // namespace annulus::test
