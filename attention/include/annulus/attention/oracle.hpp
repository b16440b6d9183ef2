#pragma once

#include <cstdint>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// The truth: sequential, float64, one row at a time, written to be read.
struct OracleOutput {
  std::vector<double> output;  ///< [B, rows, N, Dv]
  std::vector<double> lse;     ///< [B, N, rows]
};

/// Attention of the given query rows over the given columns. Host tensors of the problem's dtype,
/// the last dimension of stride 1: query [b,rows,n,D] holds the rows `rows` (global positions) of
/// batches from `first_batch` and heads from `first_head`; key [b,columns,k,D] and value
/// [b,columns,k,Dv] hold the columns from `first_column` on, mostly the whole sequence, their heads
/// those that the n query heads read (n a multiple of k).
[[nodiscard]] OracleOutput oracle_attention(
    const AttentionProblem& problem, const ConstTensorView& query, const ConstTensorView& key,
    const ConstTensorView& value, const PositionRanges& rows, std::int64_t first_batch = 0,
    std::int64_t first_head = 0, std::int64_t first_column = 0);

}  // namespace annulus
