#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/files/array_info.hpp>
#include <annulus/verification/non_finite_entries.hpp>
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
  fill({entries.data(), DType::float32, whole}, files::whole(whole));
  return entries;
}

bool is_hidden(const AttentionProblem& problem, std::int64_t batch, std::int64_t position) {
  return position >= 20 || position >= problem.mask.kv_lengths()[static_cast<std::size_t>(batch)];
}

TEST(NonFiniteEntries, AreThoseThatNoQuerySeesAndAFew) {
  const AttentionProblem problem = causal_problem();
  const AttentionShape& s = problem.shape;
  for (const std::uint64_t seed : {8U, 9U}) {
    const OperandFills fills = with_non_finite_entries(problem, {}, seed, Place::Kind::host);
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

// NaN, ∞ and −∞ all come, and a query's entry in some cases; on GPUs only values are infinite.
TEST(NonFiniteEntries, AreOfEveryKind) {
  AttentionProblem problem = causal_problem();
  problem.shape.kv_length = problem.shape.query_length;  // all keys are seen
  problem.mask.set_kv_lengths({20, 20});
  const AttentionShape& s = problem.shape;
  const auto kinds_of = [](const std::vector<float>& entries, std::set<std::string>& kinds) {
    int found = 0;
    for (const float entry : entries) {
      if (std::isfinite(entry)) continue;
      ++found;
      kinds.insert(std::isnan(entry) ? "NaN" : entry > 0 ? "inf" : "-inf");
    }
    return found;
  };
  const std::set<std::string> all{"NaN", "inf", "-inf"};
  for (const Place::Kind device : {Place::Kind::host, Place::Kind::cuda}) {
    std::set<std::string> in_keys;
    std::set<std::string> in_values;
    std::set<std::string> in_queries;
    int with_query = 0;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      const OperandFills fills = with_non_finite_entries(problem, {}, 7 * seed, device);
      EXPECT_EQ(kinds_of(columns(fills.key, s, s.head_dim), in_keys), 2);
      EXPECT_EQ(kinds_of(columns(fills.value, s, s.value_dim), in_values), 2);
      if (!fills.query) continue;
      ++with_query;
      const AttentionShape as_keys{s.batch, s.query_length, s.query_length, s.heads,
                                   s.heads, s.head_dim,     s.value_dim};
      EXPECT_EQ(kinds_of(columns(fills.query, as_keys, s.head_dim), in_queries), 1);
    }
    const bool on_host = device == Place::Kind::host;
    EXPECT_EQ(in_keys, on_host ? all : std::set<std::string>{"NaN"});
    EXPECT_EQ(in_values, all);
    EXPECT_EQ(in_queries, on_host ? all : std::set<std::string>{"NaN"});
    EXPECT_GT(with_query, 50);
    EXPECT_LT(with_query, 150);
  }
}

TEST(NonFiniteEntries, ScoresHideKeysToo) {
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
  const OperandFills spoilt = with_non_finite_entries(problem, fills, 8, Place::Kind::host);
  const std::vector<float> keys = columns(spoilt.key, problem.shape, problem.shape.head_dim);
  for (std::int64_t j = 0; j < 30; ++j) {
    EXPECT_EQ(std::isfinite(keys[static_cast<std::size_t>(j * 6)]), j >= 5 && j <= 10) << j;
  }
}

// cuDNN multiplies hidden values by 0.
TEST(NonFiniteEntries, ValuesAreFiniteWhereCudnnMayCompute) {
  for (const bool taken : {false, true}) {
    AttentionProblem problem = causal_problem();
    if (taken) {
      problem.dtype = DType::float16;
      problem.shape.head_dim = problem.shape.value_dim = 64;
    }
    const OperandFills fills = with_non_finite_entries(problem, {}, 8, Place::Kind::cuda);
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
