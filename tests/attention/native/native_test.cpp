// The native kernel on the CPU, beside the suite that every implementation has to pass
// (tests/attention/suite).
#include <gtest/gtest.h>

#include "tests/attention/native_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {
namespace {

// A model that has diverged must not look healthy.
TEST(Native, NanAndInfinityComeOutOfTheRowsThatSeeThem) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Random random(31);
  for (const float entry : {kNan, kInfinity}) {
    for (const bool capped : {false, true}) {
      if (capped && entry == kInfinity) continue;  // the cap makes it finite
      AttentionProblem problem = causal_problem_of({1, 700, 700, 2, 1, 8, 4});
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

// The results of so many pieces of the columns, merged.
Result in_pieces(const WholeAttention& whole, int pieces, DType lse_dtype) {
  Result merged(whole.block(), lse_dtype);
  std::vector<Result> parts;
  std::vector<PartialState> states;
  const std::int64_t length = whole.problem.shape.kv_length;
  for (int i = 0; i < pieces; ++i) {
    const std::int64_t begin = length * i / pieces;
    const std::int64_t count = length * (i + 1) / pieces - begin;
    AttentionBlock block = whole.block();
    block.key = block.key.slice(1, begin, count);
    block.value = block.value.slice(1, begin, count);
    block.columns = block.columns.slice({LocalPosition(begin), count});
    parts.push_back(run_native(whole.problem, block, 1, lse_dtype));
    states.push_back({parts.back().state(), 0, 0});
  }
  combine(states, merged.state());
  return merged;
}

TEST(Native, RowsOfNoWeightAreNotEmpty) {
  const WholeAttention whole = weightless_attention();
  for (const DType lse_dtype : {DType::float32, DType::float64}) {
    expect_weightless_shown(run_native(whole.problem, whole.block(), 1, lse_dtype));
    // The same in pieces: pieces without weight yield to the others, however they are cut.
    for (const int pieces : {2, 6}) {
      expect_weightless_shown(in_pieces(whole, pieces, lse_dtype));
    }
  }
  // Segments hide keys one by one.
  AttentionProblem problem = problem_of({1, 3, 4, 1, 1, 1, 1});
  problem.mask.set_segments(1, {0, 1, 2}, {0, 1, 1, 3});
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> keys{-kInfinity, -kInfinity, 1, 1};
  const Result result = run_native(problem, attention_of(problem, {1, 1, 1}, keys, keys).block());
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

TEST(Native, StronglyNegativeLogitsKeepTheirWeights) {
  // Every logit is −10000 or −10000 + ln 3, up to rounding: weights 1 and 3.
  AttentionProblem problem = problem_of({1, 1, 2, 1, 1, 1, 1});
  problem.scale = 1.0;
  const WholeAttention whole =
      attention_of(problem, {1}, {-10000.0F, -10000.0F + std::log(3.0F)}, {0, 1});
  const Result result = run_native(problem, whole.block());
  EXPECT_NEAR(*result.output.view().as<float>(), 0.75, 1e-3);
  EXPECT_NEAR(*result.lse.view().as<float>(), -10000 + std::log(4.0), 1e-3);
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

// A dense mask that shows all of a tile or strip, nothing, or columns that begin anywhere; alone,
// and beside a mask that cuts the same tiles elsewhere.
TEST(Native, DenseMaskWithEdges) {
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
        expect_accurate(run_native(problem, whole.block(), 2), whole, whole.oracle());
      }
    }
  }
}

TEST(Native, RefusesScoresThatDoNotFit) {
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

double error_in_pieces(const WholeAttention& whole, const OracleOutput& truth, int pieces,
                       DType lse_dtype) {
  const Result merged = in_pieces(whole, pieces, lse_dtype);
  EXPECT_LE(largest_shares(merged, whole.problem, truth).lse, 1);
  return error_of(merged, whole.problem.dtype, truth).output;
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
