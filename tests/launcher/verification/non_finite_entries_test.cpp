#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/verification/non_finite_columns.hpp>
#include <annulus/verification/random_scores.hpp>
#include <annulus/verification/random_tensor.hpp>

namespace annulus::verification {
namespace {

AttentionProblem causal_problem() {
  AttentionProblem problem;
  problem.shape = {2, 20, 30, 4, 2, 3, 5};  // keys from 20 on are hidden
  problem.mask.set_causal(true);
  problem.mask.set_kv_lengths({30, 12});
  return problem;
}

// Keys or values [b,s,k,d] of the whole problem.
std::vector<float> columns(const FillPart& fill, const AttentionShape& shape, std::int64_t dims) {
  const Extents whole{shape.batch, shape.kv_length, shape.kv_heads, dims};
  std::vector<float> entries(static_cast<std::size_t>(whole.product()));
  std::vector<PositionRanges> index;
  for (const std::int64_t size : whole) index.push_back(PositionRanges::all(size));
  fill({entries.data(), DType::float32, whole}, index);
  return entries;
}

bool is_hidden(const AttentionProblem& problem, std::int64_t batch, std::int64_t position) {
  return position >= 20 || position >= problem.mask.kv_lengths()[static_cast<std::size_t>(batch)];
}

TEST(NonFiniteColumns, AreThoseThatNoQuerySeesAndAFew) {
  const AttentionProblem problem = causal_problem();
  const AttentionShape& s = problem.shape;
  for (const std::uint64_t seed : {8U, 9U}) {
    const OperandFills fills = with_non_finite_columns(problem, {}, seed, Place::Kind::host);
    for (const bool keys : {true, false}) {
      const std::int64_t dims = keys ? s.head_dim : s.value_dim;
      const std::vector<float> plain =
          columns(random_operand({s.batch, s.kv_length, s.kv_heads, dims}, seed,
                                 keys ? Operand::key : Operand::value),
                  s, dims);
      const std::vector<float> entries = columns(keys ? fills.key : fills.value, s, dims);
      int seen = 0;
      std::size_t i = 0;
      for (std::int64_t b = 0; b < s.batch; ++b) {
        for (std::int64_t j = 0; j < s.kv_length; ++j) {
          for (std::int64_t kd = 0; kd < s.kv_heads * dims; ++kd, ++i) {
            if (is_hidden(problem, b, j)) {
              EXPECT_FALSE(std::isfinite(entries[i])) << b << ' ' << j;
            } else if (!std::isfinite(entries[i])) {
              EXPECT_TRUE(std::isnan(entries[i]));
              EXPECT_EQ(b, static_cast<std::int64_t>(seed % 2));
              EXPECT_GE(j, 10) << "half of the rows see it, or fewer";
              ++seen;
            } else {
              EXPECT_EQ(entries[i], plain[i]);
            }
          }
        }
      }
      EXPECT_EQ(seen, 2) << "one entry for each key/value head";
    }
  }
}

TEST(NonFiniteColumns, ScoresHideKeysToo) {
  AttentionProblem problem = causal_problem();
  problem.mask = {};
  const Extents by_key{1, 1, 1, problem.shape.kv_length};
  problem.bias = by_key;
  problem.dense_mask = by_key;
  // Keys below 5 are hidden by the mask, the others above 10 by the bias.
  OperandFills fills;
  fills.mask = [](const TensorView& part, std::span<const PositionRanges> index) {
    for (std::int64_t s = 0; s < part.size(3); ++s) {
      part.at<std::uint8_t>({0, 0, 0, s}) = index[3].global(LocalPosition(s)).value() < 5 ? 0 : 1;
    }
  };
  fills.bias = [](const TensorView& part, std::span<const PositionRanges> index) {
    for (std::int64_t s = 0; s < part.size(3); ++s) {
      part.at<float>({0, 0, 0, s}) = index[3].global(LocalPosition(s)).value() > 10 ? -INFINITY : 1;
    }
  };
  const OperandFills spoilt = with_non_finite_columns(problem, fills, 8, Place::Kind::host);
  const std::vector<float> keys = columns(spoilt.key, problem.shape, problem.shape.head_dim);
  for (std::int64_t j = 0; j < 30; ++j) {
    EXPECT_EQ(std::isfinite(keys[static_cast<std::size_t>(j * 6)]), j >= 5 && j <= 10) << j;
  }
}

// cuDNN multiplies hidden values by 0.
TEST(NonFiniteColumns, ValuesAreFiniteWhereCudnnMayCompute) {
  for (const bool taken : {false, true}) {
    AttentionProblem problem = causal_problem();
    if (taken) {
      problem.dtype = DType::float16;
      problem.shape.head_dim = problem.shape.value_dim = 64;
    }
    const OperandFills fills = with_non_finite_columns(problem, {}, 8, Place::Kind::cuda);
    const AttentionShape& s = problem.shape;
    const std::vector<float> keys = columns(fills.key, s, s.head_dim);
    const std::vector<float> values = columns(fills.value, s, s.value_dim);
    const auto finite = [](float entry) { return std::isfinite(entry); };
    EXPECT_FALSE(std::all_of(keys.begin(), keys.end(), finite));
    EXPECT_EQ(std::all_of(values.begin(), values.end(), finite), taken);
  }
}

}  // namespace
}  // namespace annulus::verification
