#include "oracle/oracle_row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <annulus/core/convert.hpp>

namespace annulus::oracle {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

struct Dot {
  double value = 0;
  double magnitude = 0;  // the sum of the terms' magnitudes
};

Dot dot(const double* a, const double* b, std::int64_t count) {
  Dot sum;
  for (std::int64_t i = 0; i < count; ++i) {
    const double term = a[i] * b[i];
    sum.value += term;
    sum.magnitude += std::abs(term);
  }
  return sum;
}

}  // namespace

Matrix matrix_of(const ConstTensorView& tensor, std::int64_t batch, std::int64_t head) {
  const std::int64_t length = tensor.size(1);
  const std::int64_t dim = tensor.size(3);
  Matrix matrix{dim};
  std::vector<float> row(static_cast<std::size_t>(dim));
  matrix.entries.reserve(static_cast<std::size_t>(length * dim));
  for (std::int64_t i = 0; i < length; ++i) {
    const void* address = tensor.address({batch, i, head});
    if (tensor.dtype() == DType::float64) {
      const auto* values = static_cast<const double*>(address);
      matrix.entries.insert(matrix.entries.end(), values, values + dim);
      continue;
    }
    to_float32(address, tensor.dtype(), row.data(), dim);
    matrix.entries.insert(matrix.entries.end(), row.begin(), row.end());
  }
  return matrix;
}

void compute_row(const Call& call, std::int64_t batch, std::int64_t head, std::int64_t t,
                 const Matrix& queries, const Matrix& keys, Row& row) {
  const AttentionProblem& problem = call.problem;
  const double scale = problem.logit_scale();
  const std::int64_t global_batch = call.first_batch + batch;
  const std::int64_t global_head = call.first_head + head;
  const GlobalPosition position = call.rows.global(LocalPosition(t));
  std::span<const float> sinks;
  if (problem.sinks) sinks = problem.sinks->of_head(global_head);

  row.keys.clear();
  row.maximum = kMinusInfinity;
  row.largest_dot = 0;
  row.largest_capped = 0;
  row.largest_bias = 0;
  for (const double sink : sinks) row.maximum = std::max(row.maximum, sink);
  for (std::int64_t j = 0; j < call.columns; ++j) {
    const GlobalPosition column(call.first_column + j);
    if (!problem.mask.visible(global_batch, global_head, position, column)) continue;
    const std::int64_t entry = call.scores.key_of(j, column);
    if (!call.scores.shows(batch, head, t, entry)) continue;
    const Dot product = dot(queries.row(t), keys.row(j), keys.columns);
    if (std::isfinite(product.magnitude)) {
      row.largest_dot = std::max(row.largest_dot, product.magnitude);
    }
    Key key{j, scale * product.value, 1};
    if (problem.soft_cap) {
      const double ratio = key.logit / *problem.soft_cap;
      key.slope = std::pow(std::cosh(ratio), -2);  // 1 − tanh², with all its digits
      key.logit = *problem.soft_cap * std::tanh(ratio);
      // An infinite product has a finite logit.
      row.largest_capped = std::fmax(row.largest_capped, std::abs(key.logit));
    }
    if (call.scores.bias) {
      const double bias = call.scores.bias->at<float>({batch, head, t, entry});
      key.logit += bias;
      if (std::isfinite(bias)) row.largest_bias = std::max(row.largest_bias, std::abs(bias));
    }
    if (problem.dropout) {
      const bool drops = problem.dropout->drops(global_batch, global_head, position, column);
      key.keep = drops ? 0.0 : problem.dropout->keep_scale();
    }
    if (key.logit > row.maximum || std::isnan(key.logit)) row.maximum = key.logit;  // NaN stays
    row.keys.push_back(key);
  }

  row.sum = 0;
  row.lse = kMinusInfinity;
  if (row.maximum == kMinusInfinity) return;
  for (const double sink : sinks) row.sum += std::exp(sink - row.maximum);
  for (Key& key : row.keys) {
    key.weight = std::exp(key.logit - row.maximum);
    row.sum += key.weight;
  }
  row.lse = row.maximum + std::log(row.sum);
}

}  // namespace annulus::oracle
