// The native kernel against the oracle, beside tests/attention/native_paths_test.cpp, which has
// masks, shapes and modifiers on every path.
#include <gtest/gtest.h>

#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {
namespace {

std::string describe(const AttentionProblem& problem) {
  return to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
         to_string(problem.mask);
}

void expect_whole_accurate(Random& random, const AttentionProblem& problem) {
  SCOPED_TRACE(describe(problem));
  problem.validate();
  const WholeAttention whole = random_attention(random, problem);
  expect_accurate(run_native(problem, whole.block()), whole, whole.oracle());
}

TEST(Native, BlockMasksBesideEveryOther) {
  Random random(16);
  int i = 0;
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    AttentionProblem problem =
        problem_of({2, 301, 1093, 4, 2, 16, 8}, i++ % 3 == 0 ? DType::bfloat16 : DType::float32);
    problem.mask = random_mask(random, kinds, 2, 301, 1093);
    problem.mask.set_block_mask(random_block_mask(random, 2, 4, 301, 1093, i % 4 == 0 ? 600 : 130));
    expect_whole_accurate(random, problem);
  }
}

// Heads from the middle on ask for their own blocks.
TEST(Native, HeadsOfAShardSeeTheirOwnBlocks) {
  Random random(17);
  AttentionProblem problem = problem_of({1, 90, 90, 6, 3, 8, 8});
  problem.mask.set_block_mask(BlockMask::random(90, 90, 6, 0.4, 1, {16, 16}));
  const WholeAttention whole = random_attention(random, problem);
  const Result all = run_native(problem, whole.block());
  AttentionBlock block = whole.block();
  block.query = block.query.slice(2, 2, 4);
  block.key = block.key.slice(2, 1, 2);
  block.value = block.value.slice(2, 1, 2);
  block.first_head = 2;
  const Result part = run_native(problem, block);
  for (std::int64_t t = 0; t < 90; ++t) {
    for (std::int64_t n = 0; n < 4; ++n) {
      ASSERT_EQ(part.output.view().at<float>({0, t, n, 0}),
                all.output.view().at<float>({0, t, n + 2, 0}));
    }
  }
}

// Nothing of a hidden block is read.
TEST(Native, HiddenBlocksHoldWhatTheyLike) {
  Random random(18);
  AttentionProblem problem = problem_of({1, 200, 700, 2, 1, 8, 8});
  // Key blocks 1 and 3 are hidden from every row.
  problem.mask.set_block_mask(
      BlockMask({1, 6}, {50, 128}, std::vector<std::uint8_t>{1, 0, 1, 0, 1, 1}));
  const WholeAttention whole = random_attention(random, problem);
  const Result clean = run_native(problem, whole.block());
  for (const std::int64_t begin : {128, 384}) {
    for (const Tensor* tensor : {&whole.key, &whole.value}) {
      const TensorView hidden = tensor->view().slice(1, begin, 128);
      for (std::int64_t j = 0; j < 128; ++j) {
        for (std::int64_t d = 0; d < 8; ++d) hidden.at<float>({0, j, 0, d}) = std::nanf("");
      }
    }
  }
  EXPECT_TRUE(run_native(problem, whole.block()) == clean);
}

// A model that has diverged must not look healthy.
TEST(Native, NanAndInfinityComeOutOfTheRowsThatSeeThem) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Random random(31);
  for (const float entry : {kNan, kInfinity}) {
    for (const bool capped : {false, true}) {
      if (capped && entry == kInfinity) continue;  // the cap makes it finite
      AttentionProblem problem = problem_of({1, 700, 700, 2, 1, 8, 4});
      problem.mask.set_causal(true);
      if (capped) problem.soft_cap = 5;
      const WholeAttention whole = random_attention(random, problem);
      // Key 300 makes logits NaN or ±∞ in every row from 300 on.
      for (std::int64_t d = 0; d < 8; ++d) whole.key.view().at<float>({0, 300, 0, d}) = entry;
      const Result result = run_native(problem, whole.block());
      std::int64_t lost = 0;
      for (std::int64_t t = 0; t < 700; ++t) {
        for (std::int64_t n = 0; n < 2; ++n) {
          const float output = result.output.view().at<float>({0, t, n, 0});
          const float lse = result.lse.view().at<float>({0, n, t});
          if (t < 300) {
            ASSERT_TRUE(std::isfinite(output) && std::isfinite(lse)) << t;
          } else if (std::isnan(entry)) {
            ASSERT_TRUE(std::isnan(output) && std::isnan(lse)) << t;
          } else {
            // An infinite key gives +∞, −∞ or, from both, NaN: only −∞ leaves the row finite.
            lost += static_cast<int>(std::isnan(output) && std::isnan(lse));
          }
        }
      }
      if (entry == kInfinity) {
        EXPECT_GT(lost, 700);
      }
      // Merging keeps it.
      const Result clean = run_native(problem_of({1, 700, 700, 2, 1, 8, 4}), whole.block());
      combine(std::vector<PartialState>{{clean.state(), 0, 0}, {result.state(), 0, 0}},
              clean.state());
      EXPECT_TRUE(std::isnan(clean.output.view().at<float>({0, 500, 0, 0})));
    }
  }
}

// Queries of rows that are padding, and values that do not lie row by row.
TEST(Native, NonFinitePaddingReachesNoRow) {
  Random random(33);
  AttentionProblem problem = problem_of({1, 20, 600, 1, 1, 8, 8});
  problem.mask.set_query_lengths({13});
  problem.mask.set_kv_lengths({555});
  const WholeAttention whole = random_attention(random, problem);
  const Result clean = run_native(problem, whole.block());
  const auto fill = [](const TensorView& view) {
    for (std::int64_t i = 0; i < view.size(1); ++i) {
      for (std::int64_t d = 0; d < 8; ++d) view.at<float>({0, i, 0, d}) = std::nanf("");
    }
  };
  fill(whole.query.view().slice(1, 13, 7));
  fill(whole.key.view().slice(1, 555, 45));
  fill(whole.value.view().slice(1, 555, 45));
  EXPECT_TRUE(run_native(problem, whole.block()) == clean);
  AttentionBlock block = whole.block();
  const Tensor key = gather(whole.key.view(), whole.columns());
  const Tensor value = gather(whole.value.view(), whole.columns());
  block.key = as_bthd(key);
  block.value = as_bthd(value);
  EXPECT_TRUE(run_native(problem, block) == clean);
}

TEST(Native, RowsOfNoWeightAreNotEmpty) {
  const WholeAttention whole = weightless_attention();
  for (const DType lse_dtype : {DType::float32, DType::float64}) {
    expect_weightless_shown(run_native(whole.problem, whole.block(), 1, lse_dtype));
    // The same in pieces: those without weight yield to the others, however they are cut.
    for (const int pieces : {2, 6}) {
      const Result merged(whole.block(), lse_dtype);
      std::vector<Result> parts;
      for (int i = 0; i < pieces; ++i) {
        const LocalRange part{LocalPosition(600 * i / pieces), 600 / pieces};
        AttentionBlock block = whole.block();
        block.key = block.key.slice(1, part.begin.value(), part.count);
        block.value = block.value.slice(1, part.begin.value(), part.count);
        block.columns = block.columns.slice(part);
        parts.push_back(run_native(whole.problem, block, 1, lse_dtype));
      }
      std::vector<PartialState> states;
      for (const Result& part : parts) states.push_back({part.state(), 0, 0});
      combine(states, merged.state());
      expect_weightless_shown(merged);
    }
  }
  // Segments hide keys one by one.
  AttentionProblem problem = problem_of({1, 3, 4, 1, 1, 1, 1});
  problem.mask.set_segments(1, {0, 1, 2}, {0, 1, 1, 3});
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Tensor query = tensor_of(DType::float32, {1, 3, 1, 1}, {1.0F, 1.0F, 1.0F});
  const Tensor key = tensor_of(DType::float32, {1, 4, 1, 1}, {-kInfinity, -kInfinity, 1.0F, 1.0F});
  const Result result = run_native(problem, {query.view(), key.view(), key.view(),
                                             PositionRanges::all(3), PositionRanges::all(4)});
  EXPECT_TRUE(std::isnan(result.output.view().at<float>({0, 0, 0, 0})));
  EXPECT_EQ(result.state().lse_at(0, 0, 1), 1.0);
  EXPECT_EQ(result.output.view().at<float>({0, 2, 0, 0}), 0.0F);
}

// Small whole numbers, whose products float32 holds exactly however large the scale.
TEST(Native, HugeLogits) {
  Random random(15);
  for (const double scale : {32.0, -64.0, 1024.0}) {
    AttentionProblem problem = problem_of({1, 30, 700, 1, 1, 16, 8});
    problem.scale = scale;
    WholeAttention whole = random_attention(random, problem);
    for (const Tensor* tensor : {&whole.query, &whole.key}) {
      auto* values = tensor->view().as<float>();
      for (std::int64_t i = 0; i < tensor->shape().product(); ++i)
        values[i] = std::round(values[i]);
    }
    const OracleOutput truth = whole.oracle();
    const Error error = error_of(run_native(problem, whole.block()), DType::float32, truth);
    double largest = 0;
    for (const double lse : truth.lse) largest = std::max(largest, std::abs(lse));
    EXPECT_GT(largest, 500);
    EXPECT_LE(error.output, accuracy_bound(DType::float32, 700).output);
    EXPECT_LE(error.lse, largest * 0x1p-24) << "one rounding of the LSE";
  }
}

TEST(Native, ProductsBeyondFloat32ShowAsNan) {
  const AttentionProblem problem = problem_of({1, 1, 3, 1, 1, 1, 1});
  const Tensor query = tensor_of(DType::float32, {1, 1, 1, 1}, {1e30F});
  const Tensor key = tensor_of(DType::float32, {1, 3, 1, 1}, {-1e30F, 1e30F, 1.0F});
  const Tensor value = tensor_of(DType::float32, {1, 3, 1, 1}, {1.0F, 2.0F, 3.0F});
  const AttentionBlock block{query.view(), key.view(), value.view(), PositionRanges::all(1),
                             PositionRanges::all(3)};
  const Result result = run_native(problem, block);
  EXPECT_TRUE(std::isnan(*result.output.view().as<float>()));
  EXPECT_TRUE(std::isnan(*result.lse.view().as<float>()));
}

TEST(Native, StronglyNegativeLogitsKeepTheirWeights) {
  // Every logit is −10000 or −10000 + ln 3, up to rounding: weights 1 and 3.
  AttentionProblem problem = problem_of({1, 1, 2, 1, 1, 1, 1});
  problem.scale = 1.0;
  const Tensor query = tensor_of(DType::float32, {1, 1, 1, 1}, {1.0F});
  const Tensor key =
      tensor_of(DType::float32, {1, 2, 1, 1}, {-10000.0F, -10000.0F + std::log(3.0F)});
  const Tensor value = tensor_of(DType::float32, {1, 2, 1, 1}, {0.0F, 1.0F});
  const AttentionBlock block{query.view(), key.view(), value.view(), PositionRanges::all(1),
                             PositionRanges::all(2)};
  const Result result = run_native(problem, block);
  EXPECT_NEAR(*result.output.view().as<float>(), 0.75, 1e-3);
  EXPECT_NEAR(*result.lse.view().as<float>(), -10000 + std::log(4.0), 1e-3);
}

TEST(Native, RowsThatSeeNothingAreEmpty) {
  Random random(16);
  AttentionProblem problem = problem_of({2, 20, 30, 2, 1, 4, 4});
  problem.mask.set_query_lengths({7, 0});
  problem.mask.set_causal(true);
  problem.mask.set_offset(-3);
  const WholeAttention whole = random_attention(random, problem);
  const Result result = run_native(problem, whole.block());
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t t = 0; t < 20; ++t) {
      const bool sees = b == 0 && t >= 3 && t < 7;
      EXPECT_EQ(std::isfinite(result.lse.view().at<float>({b, 1, t})), sees);
      EXPECT_EQ(result.output.view().at<float>({b, t, 1, 0}) != 0.0F, sees);
    }
  }
  expect_accurate(result, whole, whole.oracle());
}

TEST(Native, PaddingDoesNotSeePadding) {
  // Padding in the middle, on both sides, between documents that are seen.
  Random random(28);
  AttentionProblem problem = problem_of({1, 6, 9, 1, 1, 4, 4});
  problem.mask.set_segments(1, {0, -1, -1, 0, 1, -1}, {0, -1, 0, 1, 1, -1, 0, -1, 1});
  const WholeAttention whole = random_attention(random, problem);
  const Result result = run_native(problem, whole.block());
  for (const std::int64_t row : {1, 2, 5}) {
    EXPECT_EQ(result.output.view().at<float>({0, row, 0, 0}), 0.0F);
    EXPECT_EQ(result.state().lse_at(0, 0, row), -std::numeric_limits<double>::infinity());
  }
  expect_accurate(result, whole, whole.oracle());
}

struct LayoutPair {
  LayoutKind rows;
  LayoutKind columns;
};

class NativeShards : public ::testing::TestWithParam<LayoutPair> {};

// Results for the same rows and heads.
void combine_all(const std::vector<Result>& results, const Result& whole) {
  std::vector<PartialState> parts;
  for (const Result& result : results) parts.push_back({result.state(), 0, 0});
  combine(parts, whole.state());
}

// Every pair of shards, stored head-major, computed apart and merged: equals the whole.
TEST_P(NativeShards, MergeIntoTheWhole) {
  Random random(17);
  const std::int64_t length = 643;
  const int ranks = 3;
  const SequenceLayout row_layout(GetParam().rows, length, ranks);
  const SequenceLayout column_layout(GetParam().columns, length, ranks);
  for (const std::vector<MaskKind>& kinds : {std::vector<MaskKind>{},
                                             {MaskKind::causal},
                                             {MaskKind::window},
                                             {MaskKind::documents},
                                             {MaskKind::causal, MaskKind::segments},
                                             {MaskKind::offset, MaskKind::kv_lengths},
                                             {MaskKind::left_window, MaskKind::query_lengths}}) {
    for (const DType dtype : {DType::float32, DType::float16}) {
      AttentionProblem problem = problem_of({2, length, length, 2, 1, 16, 12}, dtype);
      problem.mask = random_mask(random, kinds, 2, length, length);
      SCOPED_TRACE(describe(problem));
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      const Result together(whole.block(), DType::float64);
      for (int r = 0; r < ranks; ++r) {
        const PositionRanges rows = row_layout.positions(r);
        const Tensor query = gather(whole.query.view(), rows);
        AttentionBlock block{as_bthd(query), whole.key.view(), whole.value.view(), rows,
                             whole.columns()};
        const Result merged(block, DType::float64);
        std::vector<Result> parts;
        for (int c = 0; c < ranks; ++c) {
          block.columns = column_layout.positions(c);
          const Tensor key = gather(whole.key.view(), block.columns);
          const Tensor value = gather(whole.value.view(), block.columns);
          block.key = as_bthd(key);
          block.value = as_bthd(value);
          parts.push_back(run_native(problem, block, 1, DType::float64));
        }
        combine_all(parts, merged);
        for (std::int64_t i = 0; i < rows.size(); ++i) {
          const std::int64_t to = rows.global(LocalPosition(i)).value();
          copy(merged.output.view().slice(1, i, 1), together.output.view().slice(1, to, 1));
          copy(merged.lse.view().slice(2, i, 1), together.lse.view().slice(2, to, 1));
        }
      }
      expect_accurate(together, whole, truth);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, NativeShards,
    ::testing::Values(LayoutPair{LayoutKind::contiguous, LayoutKind::contiguous},
                      LayoutPair{LayoutKind::zigzag, LayoutKind::zigzag},
                      LayoutPair{LayoutKind::striped, LayoutKind::striped},
                      LayoutPair{LayoutKind::striped, LayoutKind::zigzag},
                      LayoutPair{LayoutKind::contiguous, LayoutKind::striped}));

TEST(Native, PartsOfTheBatchAndOfTheHeads) {
  // A block of batches 1 and 2 and query heads 2 and 3 of 4 asks the mask about those batches.
  Random random(18);
  AttentionProblem problem = problem_of({3, 70, 90, 4, 2, 8, 8});
  problem.mask = random_mask(random, {MaskKind::segments, MaskKind::kv_lengths}, 3, 70, 90);
  const WholeAttention whole = random_attention(random, problem);
  expect_part_repeats_whole(whole);
}

TEST(Native, AnUnmaskedBlockIsNotAskedAbout) {
  Random random(19);
  AttentionProblem problem = problem_of({1, 50, 60, 2, 1, 8, 8});
  const WholeAttention whole = random_attention(random, problem);
  const Result plain = run_native(problem, whole.block());
  AttentionBlock block = whole.block();
  block.unmasked = true;
  problem.mask.set_query_lengths({0});  // would hide everything
  EXPECT_TRUE(run_native(problem, block) == plain);
}

TEST(Native, KeysThatDoNotLieRowByRow) {
  // One key and value for all positions (stride 0), and a head-minor order of the output.
  Random random(20);
  const AttentionProblem problem = problem_of({1, 9, 40, 2, 1, 8, 8});
  WholeAttention whole = random_attention(random, problem);
  AttentionBlock block = whole.block();
  const Extents strides{0, 0, 0, 1};
  block.key = ConstTensorView(whole.key.view().data(), DType::float32, {1, 40, 1, 8}, strides);
  block.value = ConstTensorView(whole.value.view().data(), DType::float32, {1, 40, 1, 8}, strides);
  const OracleOutput truth =
      oracle_attention(problem, block.query, block.key, block.value, block.rows);
  expect_accurate(run_native(problem, block), whole, truth);
}

double error_in_pieces(const WholeAttention& whole, const OracleOutput& truth, int pieces,
                       DType lse_dtype) {
  AttentionBlock block = whole.block();
  const Result merged(block, lse_dtype);
  std::vector<Result> parts;
  const std::int64_t length = whole.problem.shape.kv_length;
  for (int i = 0; i < pieces; ++i) {
    const std::int64_t begin = length * i / pieces;
    const std::int64_t count = length * (i + 1) / pieces - begin;
    block.key = whole.key.view().slice(1, begin, count);
    block.value = whole.value.view().slice(1, begin, count);
    block.columns = whole.columns().slice({LocalPosition(begin), count});
    parts.push_back(run_native(whole.problem, block, 1, lse_dtype));
  }
  combine_all(parts, merged);
  const Error error = error_of(merged, whole.problem.dtype, truth);
  EXPECT_LE(largest_shares(merged, whole.problem, truth).lse, 1);
  return error.output;
}

// docs/semantics.md §6: merging pieces costs at most a tenth over computing at once. A float32 LSE
// would cost more in float32 runs; how much is on record.
TEST(Native, MergedPiecesAreAsAccurateAsTheWhole) {
  Random random(21);
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const std::int64_t length : {256, 1024, 8192}) {
      AttentionProblem problem = problem_of({1, 256, length, 2, 1, 64, 64}, dtype);
      problem.scale = length == 1024 ? 0.3 : 0.125;
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      const double at_once = error_in_pieces(whole, truth, 1, DType::float32);
      for (const int pieces : {2, 8, 16}) {
        const double ratio = error_in_pieces(whole, truth, pieces, DType::float64) / at_once;
        EXPECT_LE(ratio, sharded_error_factor(256 * 2))
            << name_of(dtype) << " S=" << length << " pieces " << pieces << " error " << at_once;
        const double narrow = error_in_pieces(whole, truth, pieces, DType::float32) / at_once;
        const std::string name = std::string(name_of(dtype)) + "_" + std::to_string(length) + "_" +
                                 std::to_string(pieces);
        RecordProperty("ratio_" + name, std::to_string(ratio));
        RecordProperty("ratio_float32_lse_" + name, std::to_string(narrow));
      }
    }
  }
}

}  // namespace
}  // namespace annulus::test
