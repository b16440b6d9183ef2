#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::oracle {

/// A row-major matrix in float64.
struct Matrix {
  std::int64_t columns = 0;
  std::vector<double> entries = {};

  [[nodiscard]] const double* row(std::int64_t i) const { return entries.data() + i * columns; }
  [[nodiscard]] double* row(std::int64_t i) { return entries.data() + i * columns; }
};

/// tensor[batch, :, head, :].
[[nodiscard]] Matrix matrix_of(const ConstTensorView& tensor, std::int64_t batch,
                               std::int64_t head);

/// The arguments of oracle_attention() that decide what a row sees.
struct Call {
  const AttentionProblem& problem;
  PositionRanges rows;
  std::int64_t columns = 0;
  std::int64_t first_batch = 0;
  std::int64_t first_head = 0;
  std::int64_t first_column = 0;
  ScoreTensors scores = {};
};

/// A key that a row sees.
struct Key {
  std::int64_t column = 0;  ///< of the call
  double logit = 0;
  double slope = 0;   ///< the derivative of the logit by scale · q·k: 1 without a soft cap
  double keep = 1;    ///< the factor that dropout gives the probability
  double weight = 0;  ///< exp(logit − maximum)
};

/// The softmax of one row.
struct Row {
  std::vector<Key> keys;
  double maximum = 0;      ///< of the logits, sinks included; −∞ if there are none
  double sum = 0;          ///< of the weights, sinks included
  double lse = 0;          ///< maximum + log(sum)
  double largest_dot = 0;  ///< see RowTerms
  double largest_capped = 0;
  double largest_bias = 0;
};

/// Computes row `t` of a batch and a head, all of them counted within the call.
void compute_row(const Call& call, std::int64_t batch, std::int64_t head, std::int64_t t,
                 const Matrix& queries, const Matrix& keys, Row& row);

}  // namespace annulus::oracle
