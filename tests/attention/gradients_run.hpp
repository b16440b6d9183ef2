#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/attention/oracle_gradients.hpp>

#include "tests/attention/native_run.hpp"
#include "tests/attention/problem_of.hpp"

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

/// Multiplies all entries of a contiguous tensor.
inline void multiply(const Tensor& tensor, float factor) {
  const std::int64_t count = tensor.shape().product();
  std::vector<float> values(static_cast<std::size_t>(count));
  to_float32(tensor.view().data(), tensor.dtype(), values.data(), count);
  for (float& value : values) value *= factor;
  from_float32(values.data(), tensor.dtype(), tensor.view().data(), count);
}

/// A problem with what a backward call reads; its gradients are the oracle's.
struct WholeGradients {
  WholeGradients(Random& random, const AttentionProblem& problem)
      : WholeGradients(random, random_operands(random, problem)) {}
  /// The gradients of output and LSE are multiplied by `size`. `every`: the value of all entries of
  /// the output's gradient before that.
  WholeGradients(Random& random, WholeAttention whole, float size = 1,
                 std::optional<float> every = {})
      : forward(std::move(whole)) {
    const AttentionProblem& problem = forward.problem;
    const AttentionShape& s = problem.shape;
    const DType wide = is_wide(problem) ? DType::float64 : DType::float32;
    const Extents rows{s.batch, s.heads, s.query_length};
    grad_output =
        random_operand(random, problem.dtype, {s.batch, s.query_length, s.heads, s.value_dim});
    const Tensor grad_lse = random_tensor(random, DType::float32, rows);
    if (every) {
      const auto count = static_cast<std::size_t>(grad_output.shape().product());
      from_float32(std::vector<float>(count, *every).data(), problem.dtype,
                   grad_output.view().data(), static_cast<std::int64_t>(count));
    }
    if (size != 1) {
      multiply(grad_output, size);
      multiply(grad_lse, size);
    }
    const OracleOutput output = forward.oracle();
    lse = filled(wide, rows, output.lse);
    std::vector<double> deltas;
    for_each_of<3>({s.batch, s.heads, s.query_length}, [&](auto b, auto n, auto t) {
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
    });
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
    Cpu cpu;
    implementation.make_kernel(forward.problem, cpu.device)
        ->backward(block, gradients, cpu.context(threads));
  }

  /// The largest error of a gradient in its bound (docs/semantics.md §6); NaN if any gradient holds
  /// one.
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
      if (std::isnan(share) || share > largest) largest = share;
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

/// One call that adds the gradients of a block of the problem, all of them in host memory.
using AddGradients =
    std::function<void(const WholeGradients&, const BackwardBlock&, const Gradients&)>;

[[nodiscard]] inline std::vector<float> floats_of(const Tensor& tensor) {
  const auto* const entries = tensor.view().as<float>();
  return {entries, entries + tensor.shape().product()};
}

/// All gradients, one after the other.
[[nodiscard]] inline std::vector<float> floats_of(const WholeGradients& whole) {
  std::vector<float> all;
  for (const Tensor* tensor : {&whole.query, &whole.key, &whole.value, &whole.bias}) {
    if (tensor->shape().rank() == 0) continue;
    const std::vector<float> entries = floats_of(*tensor);
    all.insert(all.end(), entries.begin(), entries.end());
  }
  return all;
}

[[nodiscard]] inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// The gradients of one call, from 0.
[[nodiscard]] inline std::vector<float> run(const AddGradients& add, const WholeGradients& whole,
                                            const BackwardBlock& block) {
  whole.clear();
  add(whole, block, whole.gradients());
  return floats_of(whole);
}

[[nodiscard]] inline AddGradients gradients_by(const Implementation& implementation,
                                               int threads = 1) {
  return [&implementation, threads](const WholeGradients& whole, const BackwardBlock& block,
                                    const Gradients& gradients) {
    whole.add(implementation, block, gradients, threads);
  };
}

}  // namespace annulus::test
