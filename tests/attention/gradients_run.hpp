#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/oracle_gradients.hpp>

#include "tests/attention/native_run.hpp"

namespace annulus::test {

inline bool is_wide(const AttentionProblem& problem) {
  return problem.dtype == DType::float64;
}

inline Tensor zeros(DType dtype, const Extents& shape) {
  Tensor tensor(dtype, shape, test_memory());
  std::memset(tensor.view().data(), 0, tensor.bytes());
  return tensor;
}

inline Tensor filled(DType dtype, const Extents& shape, const std::vector<double>& values) {
  Tensor tensor(dtype, shape, test_memory());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::float64) {
      tensor.view().as<double>()[i] = values[i];
    } else {
      tensor.view().as<float>()[i] = static_cast<float>(values[i]);
    }
  }
  return tensor;
}

inline double entry(const Tensor& tensor, std::size_t i) {
  return tensor.dtype() == DType::float64 ? tensor.view().as<double>()[i]
                                          : tensor.view().as<float>()[i];
}

/// In float64, values that no narrower dtype has.
inline Tensor random_operand(Random& random, DType dtype, const Extents& shape) {
  if (dtype != DType::float64) return random_tensor(random, dtype, shape);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(shape.product()));
  for (double& value : values) value = normal(random);
  return filled(dtype, shape, values);
}

inline WholeAttention random_operands(Random& random, AttentionProblem problem) {
  const DType dtype = problem.dtype;
  if (dtype == DType::float64) problem.dtype = DType::float32;  // of tensors that are replaced
  WholeAttention whole = random_attention(random, problem);
  whole.problem.dtype = dtype;
  for (Tensor* tensor : {&whole.query, &whole.key, &whole.value}) {
    *tensor = random_operand(random, dtype, tensor->shape());
  }
  return whole;
}

/// A problem with what a backward call reads; its gradients are the oracle's.
struct WholeGradients {
  WholeGradients(Random& random, const AttentionProblem& problem)
      : WholeGradients(random, random_operands(random, problem)) {}
  WholeGradients(Random& random, WholeAttention whole) : forward(std::move(whole)) {
    const AttentionProblem& problem = forward.problem;
    const AttentionShape& s = problem.shape;
    const DType wide = is_wide(problem) ? DType::float64 : DType::float32;
    const Extents rows{s.batch, s.heads, s.query_length};
    grad_output =
        random_operand(random, problem.dtype, {s.batch, s.query_length, s.heads, s.value_dim});
    const Tensor grad_lse = random_tensor(random, DType::float32, rows);
    const OracleOutput output = forward.oracle();
    lse = filled(wide, rows, output.lse);
    std::vector<double> deltas;
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t n = 0; n < s.heads; ++n) {
        for (std::int64_t t = 0; t < s.query_length; ++t) {
          double sum = -grad_lse.view().at<float>({b, n, t});
          std::vector<float> row(static_cast<std::size_t>(s.value_dim));
          const void* const address = grad_output.view().address({b, t, n});
          const auto* const wide_row = static_cast<const double*>(address);
          if (!is_wide(problem)) to_float32(address, problem.dtype, row.data(), s.value_dim);
          for (std::int64_t d = 0; d < s.value_dim; ++d) {
            const std::int64_t at = ((b * s.query_length + t) * s.heads + n) * s.value_dim + d;
            const double grad = is_wide(problem) ? wide_row[d] : row[static_cast<std::size_t>(d)];
            sum += grad * output.output[static_cast<std::size_t>(at)];
          }
          deltas.push_back(sum);
        }
      }
    }
    delta = filled(wide, rows, deltas);
    truth = oracle_gradients(problem, forward.query.view(), forward.key.view(),
                             forward.value.view(), grad_output.view(), grad_lse.view(),
                             forward.rows(), 0, 0, 0, forward.scores());
    query = zeros(wide, forward.query.shape());
    key = zeros(wide, forward.key.shape());
    value = zeros(wide, forward.value.shape());
    if (problem.bias) bias = zeros(wide, *problem.bias);
  }

  [[nodiscard]] BackwardBlock block() const {
    BackwardBlock block{forward.query.view(), forward.key.view(), forward.value.view(),
                        grad_output.view(),   lse.view(),         delta.view(),
                        forward.rows(),       forward.columns()};
    block.scores = forward.scores();
    return block;
  }
  [[nodiscard]] Gradients gradients() const {
    Gradients all{query.view(), key.view(), value.view()};
    const AttentionShape& s = forward.problem.shape;
    if (forward.problem.bias) {
      const ConstTensorView view =
          broadcast_to(bias.view(), {s.batch, s.heads, s.query_length, s.kv_length});
      all.bias = TensorView(bias.view().data(), view.dtype(), view.shape(), view.strides());
    }
    return all;
  }

  void add(const Implementation& implementation, const BackwardBlock& block,
           const Gradients& gradients, int threads = 1) const {
    HostDevice device;
    HostStream stream("compute", Watchdog(Watchdog::Seconds(60)), nullptr);
    implementation.make_kernel(forward.problem, device)
        ->backward(block, gradients, {stream, nullptr, threads});
  }

  /// The largest error of a gradient in its bound (docs/semantics.md §6).
  [[nodiscard]] double largest_share() const {
    const double bound = 2 * accuracy_bound(forward.problem).output;
    double largest = 0;
    const auto compare = [&](const Tensor& tensor, const OracleGradient& gradient) {
      double difference = 0;
      double magnitude = 0;
      for (std::size_t i = 0; i < gradient.values.size(); ++i) {
        difference += std::pow(entry(tensor, i) - gradient.values[i], 2);
        magnitude += std::pow(gradient.magnitudes[i], 2);
      }
      const double share = difference == 0 ? 0 : std::sqrt(difference / magnitude) / bound;
      if (!(share <= largest)) largest = share;
    };
    compare(query, truth.query);
    compare(key, truth.key);
    compare(value, truth.value);
    if (forward.problem.bias) compare(bias, truth.bias);
    return largest;
  }

  /// Sets the gradients to 0.
  void clear() const {
    for (const Tensor* tensor : {&query, &key, &value, &bias}) {
      if (tensor->shape().rank() > 0) std::memset(tensor->view().data(), 0, tensor->bytes());
    }
  }

  WholeAttention forward;
  Tensor grad_output, lse, delta;
  OracleGradients truth;
  Tensor query, key, value, bias;
};

inline AttentionProblem problem_of(const AttentionShape& shape, DType dtype = DType::float32) {
  AttentionProblem problem;
  problem.shape = shape;
  problem.dtype = dtype;
  return problem;
}

/// Where the oracle's gradients are finite so are those found, and right; elsewhere none is finite.
inline void expect_same_reach(const WholeGradients& whole) {
  const auto compare = [&](const Tensor& tensor, const OracleGradient& truth, const char* name) {
    double difference = 0, magnitude = 0;
    std::size_t poisoned = 0, missed = 0, finite = 0;
    for (std::size_t i = 0; i < truth.values.size(); ++i) {
      const double found = entry(tensor, i);
      if (!std::isfinite(truth.values[i])) {
        if (std::isfinite(found)) ++missed;
      } else if (!std::isfinite(found)) {
        ++poisoned;
      } else {
        ++finite;
        difference += std::pow(found - truth.values[i], 2);
        magnitude += std::pow(truth.magnitudes[i], 2);
      }
    }
    EXPECT_EQ(poisoned, 0U) << name;
    EXPECT_EQ(missed, 0U) << name;
    EXPECT_GT(finite, 0U) << name;
    const double bound = 2 * accuracy_bound(whole.forward.problem).output;
    EXPECT_LE(std::sqrt(difference), bound * std::sqrt(magnitude)) << name;
  };
  compare(whole.query, whole.truth.query, "query");
  compare(whole.key, whole.truth.key, "key");
  compare(whole.value, whole.truth.value, "value");
}

/// Overwrites one position of all heads, of all batches or of one, or only the entry `only` there.
inline void fill(const Tensor& tensor, std::int64_t position, float x,
                 std::optional<std::int64_t> only = {}, std::int64_t batch = -1) {
  const Extents& shape = tensor.shape();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    if (batch >= 0 && b != batch) continue;
    for (std::int64_t h = 0; h < shape[2]; ++h) {
      for (std::int64_t d = 0; d < shape[3]; ++d) {
        if (only && d != *only) continue;
        from_float32(&x, tensor.dtype(), tensor.view().address({b, position, h, d}), 1);
      }
    }
  }
}

/// One call that adds the gradients of a block of the problem, all of them in host memory.
using AddGradients =
    std::function<void(const WholeGradients&, const BackwardBlock&, const Gradients&)>;

/// Blocks of rows, columns, batches and heads, with positions far from each other, add up.
inline void expect_blocks_add_up(const AddGradients& add) {
  Random random(53);
  AttentionProblem problem = problem_of({3, 24, 32, 4, 2, 8, 8});
  problem.mask.set_causal(true);
  problem.mask.set_offset(5);
  problem.dropout.emplace(0.2, 7);
  problem.bias = Extents{1, 4, 24, 1};
  problem.sinks = Sinks::random(4, 1, 3);
  const WholeGradients whole(random, problem);
  const BackwardBlock all = whole.block();
  const Gradients gradients = whole.gradients();
  const std::vector<PositionRanges> rows{PositionRanges({PositionRange{GlobalPosition(0), 12, 2}}),
                                         PositionRanges({PositionRange{GlobalPosition(1), 12, 2}})};
  const std::vector<PositionRanges> columns{
      PositionRanges({PositionRange{GlobalPosition(24), 8}, PositionRange{GlobalPosition(0), 8}}),
      PositionRanges({PositionRange{GlobalPosition(8), 16}})};
  // Views of positions that are one range; copies of those of several.
  const auto stepped = [](const auto& view, int dim, std::int64_t first) {
    auto strides = view.strides();
    auto shape = view.shape();
    strides[dim] *= 2;
    shape[dim] = 12;
    return std::decay_t<decltype(view)>(view.slice(dim, first, 1).data(), view.dtype(), shape,
                                        strides);
  };
  for (std::int64_t b = 0; b < 3; ++b) {
    for (std::int64_t k = 0; k < 2; ++k) {
      for (std::size_t r = 0; r < 2; ++r) {
        for (const PositionRanges& held : columns) {
          const auto of_rows = [&](const auto& view) {
            return stepped(view.slice(0, b, 1).slice(2, k * 2, 2), 1, static_cast<std::int64_t>(r));
          };
          const auto of_lse = [&](const auto& view) {
            return stepped(view.slice(0, b, 1).slice(1, k * 2, 2), 2, static_cast<std::int64_t>(r));
          };
          const auto of_keys = [&](const ConstTensorView& view) {
            return gather(view.slice(0, b, 1).slice(2, k, 1), held);
          };
          const Tensor key = of_keys(all.key);
          const Tensor value = of_keys(all.value);
          const Tensor grad_key = zeros(DType::float32, key.shape());
          const Tensor grad_value = zeros(DType::float32, value.shape());
          BackwardBlock block{
              of_rows(all.query), as_bthd(key),      as_bthd(value), of_rows(all.grad_output),
              of_lse(all.lse),    of_lse(all.delta), rows[r],        held};
          block.first_batch = b;
          block.first_head = k * 2;
          const ScoreTensors scores = all.scores.slice(0, b, 1).slice(1, k * 2, 2);
          block.scores.bias = stepped(*scores.bias, 2, static_cast<std::int64_t>(r));
          Gradients part{of_rows(gradients.query), as_bthd(grad_key), as_bthd(grad_value)};
          part.bias = stepped(gradients.bias.slice(0, b, 1).slice(1, k * 2, 2), 2,
                              static_cast<std::int64_t>(r));
          add(whole, block, part);
          for (std::int64_t j = 0; j < held.size(); ++j) {
            const std::int64_t position = held.global(LocalPosition(j)).value();
            for (std::int64_t d = 0; d < 8; ++d) {
              gradients.key.at<float>({b, position, k, d}) += part.key.at<float>({0, j, 0, d});
              gradients.value.at<float>({b, position, k, d}) += part.value.at<float>({0, j, 0, d});
            }
          }
        }
      }
    }
  }
  EXPECT_LT(whole.largest_share(), 0.5);
}

inline void expect_blocks_add_up(const Implementation& implementation) {
  expect_blocks_add_up(
      [&](const WholeGradients& whole, const BackwardBlock& block, const Gradients& gradients) {
        whole.add(implementation, block, gradients);
      });
}

}  // namespace annulus::test
