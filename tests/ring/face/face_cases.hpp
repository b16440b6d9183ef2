#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/attention/oracle.hpp>
#include <annulus/attention/oracle_gradients.hpp>

#include "tests/support/host_context.hpp"

/// Problems for the public interface.
namespace annulus {

using test::on_host;

inline MPI_Comm world() {
  return test::session().world();
}

/// All ranks, on their CPUs.
class Face : public ::testing::Test {
 protected:
  Context context_{world(), on_host()};
};

inline AttentionOptions causal(std::int64_t length) {
  AttentionOptions options;
  options.shape = {2, length, length, 4, 2, 16, 8};
  options.dtype = DType::float32;
  options.mask.set_causal(true);
  return options;
}

inline float value_at(int which, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
  return std::sin(static_cast<float>(which * 97 + b * 53 + t * 11 + h * 29 + d * 7));
}

// One rank's tensors, filled by global position.
struct Shards {
  Shards(const Attention& attention, int seed) {
    fill(query, attention.query_shape(), attention.query_positions(), seed);
    fill(key, attention.key_shape(), attention.key_positions(), seed + 1);
    fill(value, attention.value_shape(), attention.key_positions(), seed + 2);
    output.assign(static_cast<std::size_t>(attention.output_shape().product()), NAN);
    lse.assign(static_cast<std::size_t>(attention.lse_shape().product()), NAN);
  }
  static void fill(std::vector<float>& values, const Extents& shape,
                   const PositionRanges& positions, int which) {
    values.clear();
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t t = 0; t < shape[1]; ++t) {
        for (std::int64_t h = 0; h < shape[2]; ++h) {
          for (std::int64_t d = 0; d < shape[3]; ++d) {
            values.push_back(value_at(which, b, positions.global(LocalPosition(t)).value(), h, d));
          }
        }
      }
    }
  }
  [[nodiscard]] AttentionTensors tensors(bool with_lse, const ring::CallValues& values = {}) {
    AttentionTensors made{query.data(), key.data(), value.data(), output.data()};
    if (with_lse) made.lse = lse.data();
    made.call_values = values;
    return made;
  }

  std::vector<float> query, key, value, output, lse;
};

/// One rank's tensors of a call of the backward pass, filled by global position.
struct BackwardShards : Shards {
  BackwardShards(const Attention& attention, int seed) : Shards(attention, seed) {
    fill(grad_output, attention.output_shape(), attention.query_positions(), seed + 3);
    grad_lse.assign(lse.size(), 0.5F);
    clear();
  }
  void clear(float before = NAN) {
    grad_query.assign(query.size(), before);
    grad_key.assign(key.size(), before);
    grad_value.assign(value.size(), before);
  }
  [[nodiscard]] BackwardTensors backward() {
    return {query.data(),       key.data(),        value.data(),    output.data(),    lse.data(),
            grad_output.data(), grad_query.data(), grad_key.data(), grad_value.data()};
  }

  std::vector<float> grad_output, grad_lse, grad_query, grad_key, grad_value;
};

// `scores` holds the rank's own rows.
inline void expect_right(const Attention& attention, const AttentionOptions& options,
                         const Shards& shards, int seed, bool with_lse,
                         const ScoreTensors& scores = {}) {
  const AttentionShape& s = options.shape;
  std::vector<float> key;
  std::vector<float> value;
  const PositionRanges all = PositionRanges::all(s.kv_length);
  Shards::fill(key, {s.batch, s.kv_length, s.kv_heads, s.head_dim}, all, seed + 1);
  Shards::fill(value, {s.batch, s.kv_length, s.kv_heads, s.value_dim}, all, seed + 2);
  AttentionProblem problem = options;
  problem.normalize_output = true;
  const OracleOutput truth = oracle_attention(
      problem, {shards.query.data(), DType::float32, attention.query_shape()},
      {key.data(), DType::float32, {s.batch, s.kv_length, s.kv_heads, s.head_dim}},
      {value.data(), DType::float32, {s.batch, s.kv_length, s.kv_heads, s.value_dim}},
      attention.query_positions(), 0, 0, 0, scores);
  for (std::size_t i = 0; i < truth.output.size(); ++i) {
    ASSERT_NEAR(shards.output[i], truth.output[i], 2e-6) << i;
  }
  for (std::size_t i = 0; with_lse && i < truth.lse.size(); ++i) {
    if (std::isinf(truth.lse[i])) {
      ASSERT_EQ(shards.lse[i], truth.lse[i]) << i;
    } else {
      ASSERT_NEAR(shards.lse[i], truth.lse[i], 1e-5) << i;
    }
  }
}

/// Runs once, with tensors of its own.
inline void expect_right_run(Attention& attention, const AttentionOptions& options, int seed) {
  Shards shards(attention, seed);
  attention.run(shards.tensors(true));
  expect_right(attention, options, shards, seed, true);
}

using Numbers = std::vector<std::int32_t>;

/// The values of one call, which outlive it.
struct Values {
  Numbers query_lengths = {};
  Numbers kv_lengths = {};
  Numbers offsets = {};
  std::optional<std::uint64_t> seed = {};
  std::vector<float> sinks = {};  // one for each of the 4 heads

  [[nodiscard]] static ConstTensorView view(const Numbers& numbers) {
    if (numbers.empty()) return {};
    return {numbers.data(), DType::int32, {std::ssize(numbers)}};
  }
  [[nodiscard]] ring::CallValues views() const {
    ring::CallValues views{view(query_lengths), view(kv_lengths), view(offsets), seed};
    if (!sinks.empty()) views.sinks = {sinks.data(), DType::float32, {std::ssize(sinks), 1}};
    return views;
  }
  // The problem that such a call computes.
  [[nodiscard]] AttentionOptions applied(AttentionOptions options) const {
    const auto of_batch = [&](const Numbers& numbers) {
      return numbers.size() == 1
                 ? Numbers(static_cast<std::size_t>(options.shape.batch), numbers[0])
                 : numbers;
    };
    if (!query_lengths.empty()) options.mask.set_query_lengths(of_batch(query_lengths));
    if (!kv_lengths.empty()) options.mask.set_kv_lengths(of_batch(kv_lengths));
    if (!offsets.empty()) options.mask.set_offsets(of_batch(offsets));
    if (seed) options.dropout.emplace(options.dropout->probability(), *seed);
    if (!sinks.empty()) options.sinks = Sinks({std::ssize(sinks), 1}, sinks);
    return options;
  }
};

/// `scores` belong to the whole problem.
inline OracleGradients true_gradients(const AttentionOptions& options, int seed,
                                      bool with_grad_lse = false, const ScoreTensors& scores = {}) {
  const AttentionShape& s = options.shape;
  const auto whole = [](std::vector<float>& values, const Extents& shape, int which) {
    Shards::fill(values, shape, PositionRanges::all(shape[1]), which);
    return ConstTensorView(values.data(), DType::float32, shape);
  };
  std::vector<float> query, key, value, grad_output;
  const std::vector<float> halves(static_cast<std::size_t>(s.batch * s.heads * s.query_length),
                                  0.5F);
  return oracle_gradients(
      options, whole(query, {s.batch, s.query_length, s.heads, s.head_dim}, seed),
      whole(key, {s.batch, s.kv_length, s.kv_heads, s.head_dim}, seed + 1),
      whole(value, {s.batch, s.kv_length, s.kv_heads, s.value_dim}, seed + 2),
      whole(grad_output, {s.batch, s.query_length, s.heads, s.value_dim}, seed + 3),
      with_grad_lse
          ? ConstTensorView(halves.data(), DType::float32, {s.batch, s.heads, s.query_length})
          : ConstTensorView(),
      PositionRanges::all(s.query_length), 0, 0, 0, scores);
}

/// Compares a rank's part with the truth [B,L,H,W], to which `before` was added.
inline void expect_part(const std::vector<float>& found, const Extents& shape,
                        const PositionRanges& positions, std::int64_t length,
                        const OracleGradient& truth, float before, const char* name) {
  double error = 0;
  double scale = 1e-30;
  std::size_t i = 0;
  const std::int64_t row = shape[2] * shape[3];
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t t = 0; t < shape[1]; ++t) {
      const std::int64_t first = (b * length + positions.global(LocalPosition(t)).value()) * row;
      for (std::int64_t at = first; at < first + row; ++at, ++i) {
        const auto of = static_cast<std::size_t>(at);
        const double off = found[i] - before - truth.values[of];
        error += off * off;
        scale += truth.magnitudes[of] * truth.magnitudes[of] + before * before;
      }
    }
  }
  // Twice the bound of the output: docs/semantics.md §6.
  const double bound = 2 * 2e-6 * std::sqrt(std::log2(static_cast<double>(length)));
  EXPECT_LE(std::sqrt(error), bound * std::sqrt(scale)) << name;
}

/// Compares the rank's parts of the gradients.
inline void expect_gradients(const Attention& attention, const AttentionOptions& options,
                             const std::vector<float>& grad_query,
                             const std::vector<float>& grad_key,
                             const std::vector<float>& grad_value, const OracleGradients& truth,
                             float before = 0) {
  const AttentionShape& s = options.shape;
  expect_part(grad_query, attention.query_shape(), attention.query_positions(), s.query_length,
              truth.query, before, "grad query");
  expect_part(grad_key, attention.key_shape(), attention.key_positions(), s.kv_length, truth.key,
              before, "grad key");
  expect_part(grad_value, attention.value_shape(), attention.key_positions(), s.kv_length,
              truth.value, before, "grad value");
}

inline void expect_right_gradient(const Attention& attention, const AttentionOptions& options,
                                  int seed, const std::vector<float>& grad_query,
                                  const std::vector<float>& grad_key,
                                  const std::vector<float>& grad_value,
                                  const std::vector<float>& grad_sinks = {}) {
  const OracleGradients truth = true_gradients(options, seed);
  expect_gradients(attention, options, grad_query, grad_key, grad_value, truth);
  for (std::size_t i = 0; i < grad_sinks.size(); ++i) {
    ASSERT_NEAR(grad_sinks[i], truth.sinks.values[i], 2e-5) << "sink " << i;
  }
}

}  // namespace annulus
