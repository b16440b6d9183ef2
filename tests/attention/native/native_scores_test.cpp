// The native kernel with a bias and a dense mask.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/attention/score_cases.hpp"

namespace annulus::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void expect_whole_accurate(const WholeAttention& whole) {
  SCOPED_TRACE(to_string(whole.problem.shape) + " mask " + to_string(whole.problem.mask));
  whole.problem.validate();
  expect_accurate(run_native(whole.problem, whole.block(), 2), whole, whole.oracle());
}

// Bias and dense mask, alone and together, with every other mask; hidden bias entries are not
// finite.
TEST(NativeScores, EveryShapeBesideEveryMask) {
  Random random(21);
  const std::vector<std::vector<MaskKind>> masks = mask_combinations();
  std::size_t i = 0;
  int spoilt = 0;
  for (int round = 0; round < 3; ++round) {
    for (const Extents& shape : score_shapes(2, 4, 90, 603)) {
      AttentionProblem problem =
          problem_of({2, 90, 603, 4, 2, 16, 8},
                     std::vector{DType::float32, DType::bfloat16, DType::float16}.at(i % 3));
      problem.mask = random_mask(random, masks.at(i * 5 % masks.size()), 2, 90, 603);
      if (i % 4 == 3) problem.mask.set_block_mask(random_block_mask(random, 2, 4, 90, 603, 60));
      if (round != 1) problem.bias = shape;
      if (round != 0) {
        problem.dense_mask = round == 1 ? shape : Extents{2, 1, 90, 603};
      }
      if (i % 5 == 0) problem.soft_cap = 2;
      if (i % 5 == 1) problem.dropout.emplace(0.3, 7);
      ++i;
      const WholeAttention whole = random_attention(random, problem);
      spoilt += spoil_hidden_bias(whole);
      expect_whole_accurate(whole);
      ASSERT_FALSE(testing::Test::HasFailure()) << round << " " << to_string(shape);
    }
  }
  EXPECT_GT(spoilt, 1000);
}

// A dense mask that shows all of a tile or strip, nothing, or columns that begin anywhere; alone,
// and beside a mask that cuts the same tiles elsewhere.
TEST(NativeScores, DenseMaskWithEdges) {
  Random random(23);
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const std::int64_t heads : {1, 4}) {
      for (const bool windowed : {false, true}) {
        AttentionProblem problem = problem_of({1, 700, 1300, heads, 1, 16, 8}, dtype);
        problem.dense_mask = Extents{1, heads, 700, 1300};
        if (windowed) problem.mask.set_window(300, 200);
        const WholeAttention whole = random_attention(random, problem);
        auto* entry = static_cast<std::uint8_t*>(whole.mask.view().data());
        for (std::int64_t head = 0; head < heads; ++head) {
          for (std::int64_t i = 0; i < 700; ++i) {
            for (std::int64_t j = 0; j < 1300; ++j, ++entry) {
              *entry = j >= i / 2 + 37 * head - 200 && j <= i + 411 && i % 300 != 299 ? 1 : 0;
            }
          }
        }
        expect_whole_accurate(whole);
      }
    }
  }
}

class NativeScoreShards : public ::testing::TestWithParam<LayoutKind> {};

// Under any layout, keys of the bias are found by global position or by column, and its rows by
// local index.
TEST_P(NativeScoreShards, MergeIntoTheWhole) {
  Random random(22);
  const std::int64_t length = 643;
  const int ranks = 3;
  const SequenceLayout layout(GetParam(), length, ranks);
  for (const bool broadcast : {false, true}) {
    AttentionProblem problem = problem_of({2, length, length, 2, 1, 16, 12});
    problem.mask.set_causal(true);
    problem.bias = broadcast ? Extents{1, 2, 1, length} : Extents{2, 2, length, length};
    problem.dense_mask = broadcast ? Extents{2, 1, length, 1} : Extents{1, 2, length, length};
    const WholeAttention whole = random_attention(random, problem);
    const OracleOutput truth = whole.oracle();
    const Result together(whole.block(), DType::float64);
    for (int r = 0; r < ranks; ++r) {
      const PositionRanges rows = layout.positions(r);
      const Tensor query = gather(whole.query.view(), rows);
      const Tensor bias = broadcast ? Tensor() : gather_rows(whole.bias, rows);
      const Tensor mask = gather_rows(whole.mask, rows);
      AttentionBlock block{as_bthd(query), whole.key.view(), whole.value.view(), rows,
                           whole.columns()};
      const ScoreTensors of_all_keys = broadcast_scores(broadcast ? whole.bias.view() : bias.view(),
                                                        mask.view(), {2, 2, rows.size(), length});
      block.scores = of_all_keys;
      const Result merged(block, DType::float64);
      std::vector<Result> results;
      for (int c = 0; c < ranks; ++c) {
        block.columns = layout.positions(c);
        const Tensor key = gather(whole.key.view(), block.columns);
        const Tensor value = gather(whole.value.view(), block.columns);
        block.key = as_bthd(key);
        block.value = as_bthd(value);
        const Tensor cut_bias = gather_keys(broadcast ? whole.bias : bias, block.columns);
        const Tensor cut_mask = gather_keys(mask, block.columns);
        block.scores =
            (r + c) % 2 == 0
                ? of_all_keys
                : scores_by_column(cut_bias, cut_mask, {2, 2, rows.size(), length}, block.columns);
        results.push_back(run_native(problem, block, 1, DType::float64));
      }
      std::vector<PartialState> parts;
      for (const Result& result : results) parts.push_back({result.state(), 0, 0});
      combine(parts, merged.state());
      for (std::int64_t i = 0; i < rows.size(); ++i) {
        const std::int64_t to = rows.global(LocalPosition(i)).value();
        copy(merged.output.view().slice(1, i, 1), together.output.view().slice(1, to, 1));
        copy(merged.lse.view().slice(2, i, 1), together.lse.view().slice(2, to, 1));
      }
    }
    expect_accurate(together, whole, truth);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, NativeScoreShards,
                         ::testing::Values(LayoutKind::contiguous, LayoutKind::zigzag,
                                           LayoutKind::striped));

TEST(NativeScores, PartsOfTheBatchAndOfTheHeads) {
  Random random(23);
  AttentionProblem problem = problem_of({3, 70, 90, 4, 2, 8, 8});
  problem.bias = Extents{3, 4, 70, 90};
  problem.dense_mask = Extents{3, 1, 70, 90};
  const WholeAttention whole = random_attention(random, problem);
  expect_part_repeats_whole(whole);
}

// `unmasked` lets a kernel skip the mask, but not bias and dense mask.
TEST(NativeScores, AnUnmaskedBlockKeepsThem) {
  Random random(24);
  AttentionProblem problem = problem_of({1, 50, 700, 2, 1, 8, 8});
  problem.bias = Extents{1, 2, 50, 700};
  problem.dense_mask = Extents{1, 1, 50, 700};
  const WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = whole.block();
  block.unmasked = true;
  expect_accurate(run_native(problem, block), whole, whole.oracle());
}

// Rows 0 to 9 are hidden by the mask, 10 to 19 by the bias, 20 to 29 by both together.
TEST(NativeScores, RowsThatSeeNothingAreEmpty) {
  Random random(25);
  AttentionProblem problem = problem_of({1, 40, 700, 2, 1, 8, 8});
  problem.bias = Extents{1, 2, 40, 700};
  problem.dense_mask = Extents{1, 1, 40, 700};
  const WholeAttention whole = random_attention(random, problem);
  for (std::int64_t j = 0; j < 700; ++j) {
    for (std::int64_t t = 0; t < 10; ++t) {
      whole.mask.view().at<std::uint8_t>({0, 0, t, j}) = 0;
      for (std::int64_t n = 0; n < 2; ++n) {
        whole.bias.view().at<float>({0, n, 10 + t, j}) = -kInfinity;
        if (j % 3 == 0) whole.bias.view().at<float>({0, n, 20 + t, j}) = -kInfinity;
      }
      whole.mask.view().at<std::uint8_t>({0, 0, 20 + t, j}) = j % 3 == 0 ? 1 : 0;
    }
  }
  const Result result = run_native(problem, whole.block());
  for (std::int64_t t = 0; t < 40; ++t) {
    const double lse = result.state().lse_at(0, 1, t);
    EXPECT_EQ(lse == -std::numeric_limits<double>::infinity(), t < 30) << t;
    if (t < 30) {
      EXPECT_EQ(result.output.view().at<float>({0, t, 1, 3}), 0) << t;
    }
  }
  expect_accurate(result, whole, whole.oracle());
}

// Keys and values hidden by a dense mask or a bias of −∞ may hold anything.
TEST(NativeScores, HiddenKeysAndValuesReachNoRow) {
  Random random(26);
  for (const bool by_bias : {false, true}) {
    AttentionProblem problem = problem_of({1, 60, 600, 2, 1, 8, 4});
    (by_bias ? problem.bias : problem.dense_mask) = Extents{1, 1, 60, 600};
    const WholeAttention whole = random_attention(random, problem);
    for (std::int64_t t = 0; t < 60; ++t) {  // the even rows do not see key 300
      if (by_bias && t % 2 == 0) whole.bias.view().at<float>({0, 0, t, 300}) = -kInfinity;
      if (!by_bias) whole.mask.view().at<std::uint8_t>({0, 0, t, 300}) = t % 2 == 0 ? 0 : 1;
    }
    const Result clean = run_native(problem, whole.block());
    for (const bool in_keys : {false, true}) {
      const WholeAttention bad = with_non_finite(whole, {in_keys, std::nanf(""), {300}});
      AttentionBlock block = bad.block();
      block.scores = whole.scores();
      const Result spoilt = run_native(problem, block);
      for (std::int64_t t = 0; t < 60; ++t) {
        const float got = spoilt.output.view().at<float>({0, t, 1, NonFinite::kDim});
        if (t % 2 == 0) {
          ASSERT_EQ(got, clean.output.view().at<float>({0, t, 1, NonFinite::kDim})) << t;
        } else {
          ASSERT_TRUE(std::isnan(got)) << t;
        }
      }
    }
  }
}

TEST(NativeScores, NanAndInfinityOfABiasComeOutOfTheirRows) {
  Random random(27);
  for (const float seen : {kInfinity, std::nanf("")}) {
    AttentionProblem problem = problem_of({1, 20, 600, 2, 1, 8, 4});
    problem.bias = Extents{1, 2, 20, 600};
    const WholeAttention whole = random_attention(random, problem);
    const Result clean = run_native(problem, whole.block());
    whole.bias.view().at<float>({0, 1, 7, 555}) = seen;
    const Result spoilt = run_native(problem, whole.block());
    for (std::int64_t t = 0; t < 20; ++t) {
      for (std::int64_t n = 0; n < 2; ++n) {
        const float got = spoilt.output.view().at<float>({0, t, n, 2});
        if (t == 7 && n == 1) {
          EXPECT_TRUE(std::isnan(got));
        } else {
          EXPECT_EQ(got, clean.output.view().at<float>({0, t, n, 2}));
        }
      }
    }
  }
}

TEST(NativeScores, RefusesTensorsThatDoNotFit) {
  Random random(28);
  AttentionProblem problem = problem_of({1, 20, 30, 2, 1, 8, 4});
  problem.bias = Extents{1, 2, 20, 30};
  const WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = whole.block();
  block.scores = {};
  EXPECT_THROW((void)run_native(problem, block), InternalError);
  block.scores = whole.scores().slice(2, 0, 10);
  EXPECT_THROW((void)run_native(problem, block), InternalError);
}

}  // namespace
}  // namespace annulus::test
