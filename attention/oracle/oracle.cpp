#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <annulus/attention/oracle.hpp>
#include <annulus/core/convert.hpp>

namespace annulus {
namespace {

// tensor[batch, :, head, :] in float64, row-major.
std::vector<double> widen(const ConstTensorView& tensor, std::int64_t batch, std::int64_t head) {
  const std::int64_t length = tensor.size(1);
  const std::int64_t dim = tensor.size(3);
  std::vector<float> row(static_cast<std::size_t>(dim));
  std::vector<double> wide;
  wide.reserve(static_cast<std::size_t>(length * dim));
  for (std::int64_t i = 0; i < length; ++i) {
    const void* address = tensor.address({batch, i, head});
    if (tensor.dtype() == DType::float64) {
      const auto* values = static_cast<const double*>(address);
      wide.insert(wide.end(), values, values + dim);
      continue;
    }
    to_float32(address, tensor.dtype(), row.data(), dim);
    wide.insert(wide.end(), row.begin(), row.end());
  }
  return wide;
}

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

OracleOutput oracle_attention(const AttentionProblem& problem, const ConstTensorView& query,
                              const ConstTensorView& key, const ConstTensorView& value,
                              const PositionRanges& rows, std::int64_t first_batch,
                              std::int64_t first_head, std::int64_t first_column,
                              const ScoreTensors& scores) {
  scores.check(problem, query.shape(), key.size(1));
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const std::int64_t batch = query.size(0);
  const std::int64_t row_count = query.size(1);
  const std::int64_t heads = query.size(2);
  const std::int64_t dim = query.size(3);
  const std::int64_t columns = key.size(1);
  const std::int64_t heads_per_kv_head = heads / key.size(2);
  const std::int64_t value_dim = value.size(3);
  const double scale = problem.logit_scale();
  // The factor that dropout gives a probability: 0, or keep_scale().
  const auto keep_scale = [&](std::int64_t b, std::int64_t head, GlobalPosition row,
                              std::int64_t j) {
    if (!problem.dropout) return 1.0;
    const bool drops = problem.dropout->drops(b, head, row, GlobalPosition(first_column + j));
    return drops ? 0.0 : problem.dropout->keep_scale();
  };

  OracleOutput result;
  result.output.assign(static_cast<std::size_t>(batch * row_count * heads * value_dim), 0.0);
  result.lse.assign(static_cast<std::size_t>(batch * heads * row_count), kMinusInfinity);
  result.maximum = result.lse;
  result.sum.assign(result.lse.size(), 0.0);
  std::vector<double> logits;         // of the columns that a row sees …
  std::vector<std::int64_t> visible;  // … and which those are

  for (std::int64_t b = 0; b < batch; ++b) {
    std::vector<double> keys;
    std::vector<double> values;
    for (std::int64_t head = 0; head < heads; ++head) {
      if (head % heads_per_kv_head == 0) {  // else those of the head before
        keys = widen(key, b, head / heads_per_kv_head);
        values = widen(value, b, head / heads_per_kv_head);
      }
      const std::vector<double> queries = widen(query, b, head);
      for (std::int64_t t = 0; t < row_count; ++t) {
        const GlobalPosition row = rows.global(LocalPosition(t));
        logits.clear();
        visible.clear();
        double max = kMinusInfinity;
        std::span<const float> sinks;
        if (problem.sinks) sinks = problem.sinks->of_head(first_head + head);
        for (const double sink : sinks) max = std::max(max, sink);
        for (std::int64_t j = 0; j < columns; ++j) {
          const GlobalPosition column(first_column + j);
          if (!problem.mask.visible(first_batch + b, first_head + head, row, column)) continue;
          const std::int64_t entry = scores.key_of(j, column);
          if (!scores.shows(b, head, t, entry)) continue;
          double logit = scale * dot(&queries[static_cast<std::size_t>(t * dim)],
                                     &keys[static_cast<std::size_t>(j * dim)], dim);
          if (problem.soft_cap) logit = *problem.soft_cap * std::tanh(logit / *problem.soft_cap);
          if (scores.bias) logit += scores.bias->at<float>({b, head, t, entry});
          logits.push_back(logit);
          visible.push_back(j);
          if (logit > max || std::isnan(logit)) max = logit;  // NaN stays
        }
        double* output = &result.output[static_cast<std::size_t>(
            ((b * row_count + t) * heads + head) * value_dim)];
        const auto index = static_cast<std::size_t>((b * heads + head) * row_count + t);
        if (max == kMinusInfinity) {
          if (visible.empty()) continue;  // output 0, LSE and maximum −∞, sum 0
          // All logits are −∞: 0/0, and the log of 0.
          std::fill_n(output, value_dim, std::numeric_limits<double>::quiet_NaN());
          continue;
        }
        double sum = 0;
        for (const double sink : sinks) sum += std::exp(sink - max);
        for (std::size_t i = 0; i < visible.size(); ++i) {
          const double weight = std::exp(logits[i] - max);
          sum += weight;
          const double kept =
              weight * keep_scale(first_batch + b, first_head + head, row, visible[i]);
          for (std::int64_t d = 0; d < value_dim; ++d) {
            output[d] += kept * values[static_cast<std::size_t>(visible[i] * value_dim + d)];
          }
        }
        if (problem.normalize_output) {
          for (std::int64_t d = 0; d < value_dim; ++d) output[d] /= sum;
        }
        result.lse[index] = max + std::log(sum);
        result.maximum[index] = std::isnan(sum) ? sum : max;
        result.sum[index] = sum;
      }
    }
  }
  return result;
}

}  // namespace annulus
