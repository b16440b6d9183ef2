#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/accuracy.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"

namespace annulus::test {

/// Finite numbers at the ends of the range of docs/semantics.md §1: logits of ±`logit`, 10³⁸ at
/// most, and for each row values that add up to nearly 10³⁸. `dtype` has float32's range.
inline WholeAttention widest_attention(DType dtype, std::int64_t dim, double logit = 1e38) {
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kKeys = 600;
  const auto root = static_cast<float>(0.99 * std::sqrt(logit));
  AttentionProblem problem = problem_of({1, kRows, kKeys, 1, 1, dim, dim}, dtype);
  problem.scale = 1.0;
  const auto d = static_cast<std::size_t>(dim);
  std::vector<float> queries(kRows * d, 0.0F);
  for (std::size_t t = 0; t < kRows; ++t) queries[t * d] = t % 3 == 0 ? -root : root;
  std::vector<float> keys(kKeys * d, 0.0F);
  std::vector<float> values(kKeys * d);
  for (std::size_t j = 0; j < kKeys; ++j) {
    keys[j * d] = j % 2 == 0 ? root : -root;
    for (std::size_t i = 0; i < d; ++i) {
      values[j * d + i] = 0.99e38F / kKeys * (1 - static_cast<float>((j + i) % 8) / 16);
    }
  }
  return attention_of(problem, queries, keys, values);
}

inline void expect_right_at_the_ends_of_the_range(const WholeAttention& whole,
                                                  const Result& result) {
  const OracleOutput truth = whole.oracle();
  const AttentionProblem& problem = whole.problem;
  EXPECT_LE(error_of(result, problem.dtype, truth).output,
            accuracy_bound(problem.dtype, problem.shape.kv_length).output);
  for (std::size_t i = 0; i < truth.lse.size(); ++i) {
    const double lse = result.state().lse_at(0, 0, static_cast<std::int64_t>(i));
    ASSERT_NEAR(lse / truth.lse[i], 1, 1e-6) << "row " << i;
  }
}

}  // namespace annulus::test
