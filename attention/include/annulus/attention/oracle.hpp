#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus {

/// The magnitudes of the terms in a row's sums, to which its rounding errors are proportional (see
/// accuracy.hpp). Sums are over the keys j that the row sees; p is the factor of the value in the
/// normalised output, after dropout. Entries that are not finite count as 0.
struct RowTerms {
  double root_square = 0;     ///< √Σ p²‖v‖²
  double sum = 0;             ///< Σ p‖v‖
  double largest_dot = 0;     ///< the largest Σ|qᵢkᵢ|
  double largest_capped = 0;  ///< of logits under a soft cap, before the bias, in magnitude
  double largest_bias = 0;    ///< in magnitude
};

/// The reference: sequential, float64, one row at a time, written to be read.
struct OracleOutput {
  std::vector<double> output;        ///< [B, rows, N, Dv]
  std::vector<double> lse;           ///< [B, N, rows]
  std::vector<double> maximum = {};  ///< likewise: largest logits, sinks included …
  std::vector<double> sum = {};      ///< … and the sums of exp(logit − maximum)
  std::vector<RowTerms> terms = {};  ///< [B, N, rows]
};

/// Attention of some query rows over some columns; problem.normalize_output says whether the output
/// is normalised. The tensors lie on the host, have the problem's dtype, and the stride of their
/// last dimension is 1. query [b,rows,n,D] holds the rows at global positions `rows`, of the
/// batches from `first_batch` on and the heads from `first_head` on. key [b,columns,k,D] and value
/// [b,columns,k,Dv] hold the columns from `first_column` on (mostly the whole sequence) and the
/// heads that the n query heads read; n is a multiple of k. `scores` holds bias and dense mask of
/// these batches, heads and rows, if the problem has them.
[[nodiscard]] OracleOutput oracle_attention(
    const AttentionProblem& problem, const ConstTensorView& query, const ConstTensorView& key,
    const ConstTensorView& value, const PositionRanges& rows, std::int64_t first_batch = 0,
    std::int64_t first_head = 0, std::int64_t first_column = 0, const ScoreTensors& scores = {});

}  // namespace annulus
