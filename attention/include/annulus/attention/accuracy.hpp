#pragma once

#include <cstdint>

#include <annulus/attention/oracle.hpp>
#include <annulus/attention/problem.hpp>
#include <annulus/core/dtype.hpp>

namespace annulus {

/// The largest deviation from the oracle that docs/semantics.md §6 allows.
struct AccuracyBound {
  double output = 0;  ///< relative Frobenius error of the whole output
  double lse = 0;     ///< absolute error of an LSE, apart from the rounding of dot products
};

[[nodiscard]] AccuracyBound accuracy_bound(DType dtype, std::int64_t kv_length);
/// The bound for a problem's results. An unnormalised output is judged together with its sum, which
/// is float32.
[[nodiscard]] AccuracyBound accuracy_bound(const AttentionProblem& problem);

/// The allowed deviation of a single row. A norm over the whole output would hide a wrong row among
/// thousands, since rows that see few keys dominate it.
struct RowBound {
  double output = 0;  ///< the norm of the row's error
  double lse = 0;     ///< absolute; of a maximum likewise
};

/// The factor c of docs/semantics.md §6. Rows of all kernels stay below half of the bound.
inline constexpr double kRowErrorFactor = 4;

/// `output_norm` is the norm of the row's true output.
[[nodiscard]] RowBound row_bound(const AttentionProblem& problem, const RowTerms& terms,
                                 double output_norm);

/// The largest permitted ratio of a sharded run's output error to that of the same implementation
/// unsharded (docs/semantics.md §6). It depends on the number of output rows: errors within a row
/// are correlated, so with few rows chance dominates the ratio.
[[nodiscard]] double sharded_error_factor(std::int64_t output_rows);

}  // namespace annulus
