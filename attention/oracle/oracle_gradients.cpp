#include <cmath>
#include <limits>

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/core/error.hpp>

#include "oracle/oracle_row.hpp"

namespace annulus {
namespace {

using oracle::Matrix;

OracleGradient zeros(std::int64_t elements) {
  const auto size = static_cast<std::size_t>(elements);
  return {std::vector<double>(size, 0.0), std::vector<double>(size, 0.0)};
}

// A number, and the magnitude that stands for it in a bound.
struct Sized {
  double value = 0;
  double magnitude = 0;

  [[nodiscard]] Sized times(double factor) const {
    return {value * factor, magnitude * std::abs(factor)};
  }
};

// Adds to one entry.
void add(OracleGradient& gradient, std::int64_t index, const Sized& term) {
  gradient.values[static_cast<std::size_t>(index)] += term.value;
  gradient.magnitudes[static_cast<std::size_t>(index)] += term.magnitude;
}

// Adds factor · row to the entries from `first` on.
void add_scaled(OracleGradient& gradient, std::int64_t first, const Sized& factor,
                const double* row, std::int64_t count) {
  for (std::int64_t d = 0; d < count; ++d) add(gradient, first + d, factor.times(row[d]));
}

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// The part of a bias that belongs to a call, as broadcast.
Extents bias_shape(const Extents& whole, const Extents& of_call) {
  Extents shape = of_call;
  for (int dim = 0; dim < 4; ++dim) {
    if (whole[dim] == 1) shape[dim] = 1;
  }
  return shape;
}

std::int64_t bias_index(const Extents& shape, const Extents& entry) {
  std::int64_t index = 0;
  for (int dim = 0; dim < 4; ++dim) index = index * shape[dim] + (shape[dim] == 1 ? 0 : entry[dim]);
  return index;
}

// ‖a ∘ b‖²
double square_of_products(const double* a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < b.size(); ++d) sum += a[d] * b[d] * a[d] * b[d];
  return sum;
}

double gradient_of_lse(const ConstTensorView& grad_lse, std::int64_t b, std::int64_t head,
                       std::int64_t t) {
  if (grad_lse.shape().rank() == 0) return 0;
  if (grad_lse.dtype() == DType::float64) return grad_lse.at<double>({b, head, t});
  return grad_lse.at<float>({b, head, t});
}

void check(const AttentionProblem& problem, const Extents& query, const Extents& value,
           const ConstTensorView& grad_output, const ConstTensorView& grad_lse) {
  if (!problem.normalize_output) {
    throw ArgumentError("normalize_output", "false", "true, for gradients");
  }
  if (problem.weights) {
    throw ArgumentError("weights", "requested", "no attention weights, for gradients");
  }
  const Extents output{query[0], query[1], query[2], value[3]};
  const Extents lse{query[0], query[2], query[1]};
  if (!(grad_output.shape() == output) || grad_output.dtype() != problem.dtype ||
      (grad_lse.shape().rank() > 0 && !(grad_lse.shape() == lse))) {
    throw InternalError("gradients of an output " + to_string(grad_output.shape()) +
                        " and an LSE " + to_string(grad_lse.shape()) + ", expected " +
                        to_string(output) + " and " + to_string(lse));
  }
}

}  // namespace

OracleGradients oracle_gradients(const AttentionProblem& problem, const ConstTensorView& query,
                                 const ConstTensorView& key, const ConstTensorView& value,
                                 const ConstTensorView& grad_output,
                                 const ConstTensorView& grad_lse, const PositionRanges& rows,
                                 std::int64_t first_batch, std::int64_t first_head,
                                 std::int64_t first_column, const ScoreTensors& scores) {
  scores.check(problem, query.shape(), key.size(1));
  check(problem, query.shape(), value.shape(), grad_output, grad_lse);
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const std::int64_t batch = query.size(0);
  const std::int64_t row_count = query.size(1);
  const std::int64_t heads = query.size(2);
  const std::int64_t dim = query.size(3);
  const std::int64_t columns = key.size(1);
  const std::int64_t kv_heads = key.size(2);
  const std::int64_t value_dim = value.size(3);
  const double scale = problem.logit_scale();
  const oracle::Call call{problem, rows, columns, first_batch, first_head, first_column, scores};

  OracleGradients result;
  result.query = zeros(batch * row_count * heads * dim);
  result.key = zeros(batch * columns * kv_heads * dim);
  result.value = zeros(batch * columns * kv_heads * value_dim);
  Extents bias{0, 0, 0, 0};
  if (problem.bias) {
    const std::int64_t bias_keys = scores.by_column ? columns : problem.shape.kv_length;
    bias = bias_shape(*problem.bias, {batch, heads, row_count, bias_keys});
    result.bias = zeros(bias.product());
    result.bias_squares.resize(result.bias.values.size());
  }
  const bool own_sinks = problem.sinks && problem.sinks->shape().rank() == 2;  // by head
  const std::int64_t sinks = problem.sinks ? problem.sinks->per_head() : 0;
  result.sinks = zeros(own_sinks ? heads * sinks : sinks);
  result.sink_squares.resize(result.sinks.values.size());

  oracle::Row row;
  std::vector<double> output(static_cast<std::size_t>(value_dim));
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const std::int64_t kv_head = head / (heads / kv_heads);
      const Matrix queries = oracle::matrix_of(query, b, head);
      const Matrix keys = oracle::matrix_of(key, b, kv_head);
      const Matrix values = oracle::matrix_of(value, b, kv_head);
      const Matrix grad_outputs = oracle::matrix_of(grad_output, b, head);
      for (std::int64_t t = 0; t < row_count; ++t) {
        oracle::compute_row(call, b, head, t, queries, keys, row);
        if (row.lse == kMinusInfinity) continue;
        const double* const grad = grad_outputs.row(t);

        output.assign(output.size(), 0.0);
        for (const oracle::Key& seen : row.keys) {
          const double kept = seen.weight / row.sum * seen.keep;
          for (std::int64_t d = 0; d < value_dim; ++d) {
            output[static_cast<std::size_t>(d)] += kept * values.row(seen.column)[d];
          }
        }
        // The gradient of a row that sees no key may be padding, and NaN.
        const double from_output = row.keys.empty() ? 0 : dot(grad, output.data(), value_dim);
        const double delta = from_output - gradient_of_lse(grad_lse, b, head, t);

        double of_all_keys = 0;  // on one entry of the bias
        const auto add_bias_square = [&](std::int64_t entry, double magnitude) {
          const std::int64_t index = bias_index(bias, {b, head, t, entry});
          result.bias_squares[static_cast<std::size_t>(index)] += magnitude * magnitude;
        };
        for (const oracle::Key& seen : row.keys) {
          const std::int64_t j = seen.column;
          const double probability = seen.weight / row.sum;
          const double grad_probability = seen.keep * dot(grad, values.row(j), value_dim);
          const Sized grad_logit{probability * (grad_probability - delta),
                                 probability * (std::abs(grad_probability) + std::abs(delta))};
          const Sized grad_product = grad_logit.times(seen.slope * scale);
          const double kept = probability * seen.keep;
          const std::int64_t kv_row = (b * columns + j) * kv_heads + kv_head;
          const std::int64_t query_row = (b * row_count + t) * heads + head;
          add_scaled(result.value, kv_row * value_dim, {kept, kept}, grad, value_dim);
          add_scaled(result.query, query_row * dim, grad_product, keys.row(j), dim);
          add_scaled(result.key, kv_row * dim, grad_product, queries.row(t), dim);
          if (problem.bias) {
            const std::int64_t entry = scores.key_of(j, GlobalPosition(first_column + j));
            add(result.bias, bias_index(bias, {b, head, t, entry}), grad_logit);
            of_all_keys += grad_logit.magnitude;
            if (bias[3] != 1) add_bias_square(entry, grad_logit.magnitude);
          }
        }
        if (problem.bias && bias[3] == 1) add_bias_square(0, of_all_keys);

        for (std::int64_t m = 0; m < sinks; ++m) {
          const double logit =
              problem.sinks->of_head(first_head + head)[static_cast<std::size_t>(m)];
          const double probability = std::exp(logit - row.lse);
          const std::int64_t entry = (own_sinks ? head * sinks : 0) + m;
          add(result.sinks, entry, {-probability * delta, probability * std::abs(delta)});
          result.sink_squares[static_cast<std::size_t>(entry)] +=
              row.keys.empty() ? 0 : std::pow(probability, 2) * square_of_products(grad, output);
        }
      }
    }
  }
  return result;
}

}  // namespace annulus
