#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"

/// Infinities and NaNs among the inputs: they must reach the rows that see them, and no others.
namespace annulus::test {

/// NaN or an infinity in some keys or values.
struct NonFinite {
  bool in_keys = false;  ///< else in the values
  float value = std::numeric_limits<float>::quiet_NaN();
  std::set<std::int64_t> positions;  ///< in every batch, in key/value head 0

  /// The one dimension of the values that it is in.
  static constexpr std::int64_t kDim = 1;
};

inline WholeAttention with_non_finite(const WholeAttention& clean, const NonFinite& entries) {
  const AttentionShape& s = clean.problem.shape;
  const auto copy_of = [](const Tensor& tensor) {
    Tensor same(tensor.dtype(), tensor.shape(), test_memory());
    copy(tensor.view(), same.view());
    return same;
  };
  WholeAttention bad{clean.problem, copy_of(clean.query), copy_of(clean.key), copy_of(clean.value)};
  const TensorView target = entries.in_keys ? bad.key.view() : bad.value.view();
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (const std::int64_t j : entries.positions) {
      void* const address = target.address({b, j, 0, entries.in_keys ? 0 : NonFinite::kDim});
      from_float32(&entries.value, bad.problem.dtype, address, 1);
    }
  }
  return bad;
}

/// `clean` and `bad` are results of the same kernel, the latter with such entries. Rows (of a batch
/// and a head) that see none of them must keep every bit, or change by `tolerance` at most. In rows
/// that see one, NaN in a key must spoil everything, NaN in a value its one dimension.
inline void expect_confined(const WholeAttention& whole, const NonFinite& entries,
                            const Result& clean, const Result& bad, float tolerance = 0) {
  // Equal infinities are the same, too.
  const auto same = [&](float a, float b) { return a == b || std::abs(a - b) <= tolerance; };
  const AttentionShape& s = whole.problem.shape;
  std::int64_t reached = 0;
  std::int64_t spared = 0;
  for_each_of<3>({s.batch, s.heads, s.query_length}, [&](auto b, auto n, auto t) {
    bool sees = false;
    for (const std::int64_t j : entries.positions) {
      sees = sees || (n < s.heads_per_kv_head() &&
                      whole.problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(j)));
    }
    ++(sees ? reached : spared);
    const float lse = bad.lse.view().at<float>({b, n, t});
    const bool same_lse = same(lse, clean.lse.view().at<float>({b, n, t}));
    for (std::int64_t d = 0; d < s.value_dim; ++d) {
      const float value = bad.output.view().at<float>({b, t, n, d});
      const bool hit = sees && (entries.in_keys || d == NonFinite::kDim);
      if (!hit) {
        ASSERT_TRUE(same(value, clean.output.view().at<float>({b, t, n, d})))
            << "batch " << b << " head " << n << " row " << t << " dimension " << d << ": "
            << value;
      } else if (std::isnan(entries.value)) {
        ASSERT_TRUE(std::isnan(value)) << "batch " << b << " head " << n << " row " << t;
      } else {
        ASSERT_FALSE(std::isfinite(value)) << "batch " << b << " head " << n << " row " << t;
      }
    }
    if (sees && entries.in_keys) {
      ASSERT_TRUE(std::isnan(lse)) << "batch " << b << " head " << n << " row " << t;
    } else {
      ASSERT_TRUE(same_lse) << "batch " << b << " head " << n << " row " << t;
    }
  });
  // The cases that follow have both.
  EXPECT_GT(reached, 0);
  EXPECT_GT(spared, 0);
}

/// Hides entries of keys and values by every kind of mask (by block masks only if `blocks`), and
/// expects that they change no other rows.
inline void expect_non_finite_confined(DType dtype,
                                       const std::function<Result(const WholeAttention&)>& run,
                                       bool blocks = true, float tolerance = 0,
                                       std::int64_t dim = 8, std::int64_t value_dim = 4) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr std::int64_t kLength = 700;
  Random random(31);
  std::vector<Mask> masks(7);
  masks[0].set_causal(true);
  masks[1].set_window(40, 3);
  std::vector<std::int32_t> ids = random_documents(random, 2, kLength);
  masks[2].set_segments(2, ids, ids);
  ids = random_segments(random, 2, kLength);
  masks[3].set_causal(true);
  masks[3].set_segments(2, ids, ids);
  masks[4].set_kv_lengths({650, 250});
  masks[4].set_query_lengths({400, 700});
  masks[5].set_block_mask(BlockMask::random(kLength, kLength, 4, 0.5, 1, {64, 48}));
  masks[6].set_causal(true);
  masks[6].set_block_mask(BlockMask::random(kLength, kLength, 1, 0.5, 2, {128, 128}));
  if (!blocks) masks.resize(5);
  for (const Mask& mask : masks) {
    AttentionProblem problem = problem_of({2, kLength, kLength, 4, 2, dim, value_dim}, dtype);
    problem.mask = mask;
    if (&mask == &masks[3] && tolerance == 0) problem.scale = 0.0;  // 0 · NaN is NaN too
    const WholeAttention whole = random_attention(random, problem);
    const Result clean = run(whole);
    for (const bool in_keys : {false, true}) {
      for (const float value : {kNan, kInfinity, -kInfinity}) {
        if (in_keys && !std::isnan(value)) continue;  // −∞ is a logit like any other
        const NonFinite entries{in_keys, value, {300, 303, 699}};
        SCOPED_TRACE(to_string(mask) + (in_keys ? ": keys " : ": values ") + std::to_string(value));
        expect_confined(whole, entries, clean, run(with_non_finite(whole, entries)), tolerance);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

/// Queries (1, 0, …) against keys of which some have a logit of −∞. Batch 0 sees nothing else;
/// batch 1 sees others at the end, batch 3 at the beginning; batch 2 sees nothing at all.
inline WholeAttention weightless_attention(DType dtype = DType::float32, std::int64_t dim = 2) {
  constexpr std::int64_t kKeys = 600;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  AttentionProblem problem = problem_of({4, 3, kKeys, 1, 1, dim, dim}, dtype);
  problem.scale = 1.0;
  problem.mask.set_kv_lengths({500, kKeys, 0, kKeys});
  const auto along_first_dim = [dim](const std::vector<float>& values) {
    std::vector<float> vectors(values.size() * static_cast<std::size_t>(dim));
    for (std::size_t i = 0; i < values.size(); ++i) {
      vectors[i * static_cast<std::size_t>(dim)] = values[i];
    }
    return vectors;
  };
  std::vector<float> keys(4 * kKeys, -kInfinity);
  for (const std::int64_t begin : {std::int64_t{500}, 2 * kKeys - 100, 3 * kKeys}) {
    std::fill_n(keys.begin() + begin, 100, 1.0F);  // of batch 0 hidden
  }
  return attention_of(problem, along_first_dim(std::vector<float>(12, 1.0F)), along_first_dim(keys),
                      std::vector<float>(static_cast<std::size_t>(4 * kKeys * dim), 2.0F));
}

inline void expect_weightless_shown(const Result& result) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t dims = result.output.shape()[3];
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t d = 0; d < dims; ++d) {
      EXPECT_TRUE(std::isnan(result.output.view().at<float>({0, t, 0, d})));
      EXPECT_NEAR(result.output.view().at<float>({1, t, 0, d}), 2.0F, 1e-5F);
      EXPECT_EQ(result.output.view().at<float>({2, t, 0, d}), 0.0F);
      EXPECT_NEAR(result.output.view().at<float>({3, t, 0, d}), 2.0F, 1e-5F);
    }
    EXPECT_EQ(result.state().lse_at(0, 0, t), -kInfinity);
    EXPECT_NEAR(result.state().lse_at(1, 0, t), 1 + std::log(100.0), 1e-5);
    EXPECT_EQ(result.state().lse_at(2, 0, t), -kInfinity);
    EXPECT_NEAR(result.state().lse_at(3, 0, t), 1 + std::log(100.0), 1e-5);
  }
}

/// A logit of NaN before one of −∞: all of the row is NaN.
inline void expect_nan_before_weightless_shown(
    DType dtype, const std::function<Result(const WholeAttention&)>& run) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  AttentionProblem problem = problem_of({1, 1, 2, 1, 1, 1, 1}, dtype);
  problem.scale = 1.0;
  const Result result = run(attention_of(problem, {1}, {kNan, -kInfinity}, {2, 2}));
  EXPECT_TRUE(std::isnan(result.output.view().at<float>({0, 0, 0, 0})));
  EXPECT_TRUE(std::isnan(result.state().lse_at(0, 0, 0)));
}

/// A key that is seen, but whose weight is 0 beside the others', with a NaN in its value.
inline void expect_nan_without_weight_shown(
    DType dtype, std::int64_t dim, const std::function<Result(const WholeAttention&)>& run) {
  constexpr std::int64_t kLength = 300;
  constexpr std::int64_t kKey = 5;
  const auto size = static_cast<std::size_t>(kLength * dim);
  std::vector<float> keys(size, 0.0F);
  keys[static_cast<std::size_t>(kKey * dim)] = -1000;
  std::vector<float> values(size, 1.0F);
  values[static_cast<std::size_t>(kKey * dim + 1)] = std::numeric_limits<float>::quiet_NaN();
  AttentionProblem problem = causal_problem_of({1, kLength, kLength, 1, 1, dim, dim}, dtype);
  problem.scale = 1.0;
  const Result result = run(attention_of(problem, std::vector<float>(size, 1.0F), keys, values));
  for (std::int64_t t = 0; t < kLength; ++t) {
    for (std::int64_t d = 0; d < dim; ++d) {
      const auto got = result.output.view().at<float>({0, t, 0, d});
      if (d == 1 && t >= kKey) {
        ASSERT_TRUE(std::isnan(got)) << "row " << t;
      } else {
        ASSERT_NEAR(got, 1, 1e-5) << "row " << t << " dimension " << d;
      }
    }
  }
}

}  // namespace annulus::test
