#include <algorithm>
#include <cmath>
#include <limits>

#include <annulus/attention/oracle.hpp>

#include "oracle/oracle_row.hpp"

namespace annulus {
namespace {

using oracle::Matrix;

// The squared norm of each row, without entries that are not finite.
std::vector<double> squared_norms(const Matrix& matrix, std::int64_t rows) {
  std::vector<double> squares(static_cast<std::size_t>(rows), 0.0);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t d = 0; d < matrix.columns; ++d) {
      const double entry = matrix.row(i)[d];
      if (std::isfinite(entry)) squares[static_cast<std::size_t>(i)] += entry * entry;
    }
  }
  return squares;
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
  const std::int64_t heads_per_kv_head = heads / key.size(2);
  const std::int64_t value_dim = value.size(3);
  const oracle::Call call{problem,    rows,         key.size(1), first_batch,
                          first_head, first_column, scores};

  OracleOutput result;
  result.output.assign(static_cast<std::size_t>(batch * row_count * heads * value_dim), 0.0);
  result.lse.assign(static_cast<std::size_t>(batch * heads * row_count), kMinusInfinity);
  result.maximum = result.lse;
  result.sum.assign(result.lse.size(), 0.0);
  result.terms.resize(result.lse.size());
  oracle::Row row;

  for (std::int64_t b = 0; b < batch; ++b) {
    Matrix keys;
    Matrix values;
    std::vector<double> value_squares;
    for (std::int64_t head = 0; head < heads; ++head) {
      if (head % heads_per_kv_head == 0) {  // else the keys of the head before
        keys = oracle::matrix_of(key, b, head / heads_per_kv_head);
        values = oracle::matrix_of(value, b, head / heads_per_kv_head);
        value_squares = squared_norms(values, key.size(1));
      }
      const Matrix queries = oracle::matrix_of(query, b, head);
      for (std::int64_t t = 0; t < row_count; ++t) {
        oracle::compute_row(call, b, head, t, queries, keys, row);
        const auto index = static_cast<std::size_t>((b * heads + head) * row_count + t);
        RowTerms& terms = result.terms[index];
        terms.largest_dot = row.largest_dot;
        terms.largest_capped = row.largest_capped;
        terms.largest_bias = row.largest_bias;
        double* output = &result.output[static_cast<std::size_t>(
            ((b * row_count + t) * heads + head) * value_dim)];
        if (row.maximum == kMinusInfinity) {
          if (row.keys.empty()) continue;  // output 0, LSE and maximum −∞, sum 0
          // All logits are −∞: 0/0, and the log of 0.
          std::fill_n(output, value_dim, std::numeric_limits<double>::quiet_NaN());
          continue;
        }
        double squares = 0;
        for (const oracle::Key& seen : row.keys) {
          const double kept = seen.weight * seen.keep;
          const double value_square = value_squares[static_cast<std::size_t>(seen.column)];
          squares += kept * kept * value_square;
          terms.sum += kept * std::sqrt(value_square);
          for (std::int64_t d = 0; d < value_dim; ++d) {
            output[d] += kept * values.row(seen.column)[d];
          }
        }
        if (problem.normalize_output) {
          for (std::int64_t d = 0; d < value_dim; ++d) output[d] /= row.sum;
        }
        terms.root_square = std::sqrt(squares) / row.sum;
        terms.sum /= row.sum;
        result.lse[index] = row.lse;
        result.maximum[index] = std::isnan(row.sum) ? row.sum : row.maximum;
        result.sum[index] = row.sum;
      }
    }
  }
  return result;
}

}  // namespace annulus
