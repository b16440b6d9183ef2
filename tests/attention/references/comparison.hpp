#pragma once

#include <cstdint>
#include <span>

#include <annulus/attention/oracle.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

#include "tests/attention/references/reference_case.hpp"

namespace annulus::test {

/// True if a query row sees any key.
[[nodiscard]] bool sees_nothing(const ReferenceCase& reference, std::int64_t batch,
                                std::int64_t head, std::int64_t row);

/// Checks that rows that see nothing hold what the case states, if it differs there.
void expect_documented_empty_rows(const ReferenceCase& reference);

/// The reference's results, and (0, −∞) in rows that see nothing if it differs there. NaN stands
/// for an LSE that the reference does not give.
[[nodiscard]] OracleOutput expected_of(const ReferenceCase& reference);

/// The part of the results that a rank holds: `index` holds its positions along [B,T,N].
[[nodiscard]] OracleOutput part_of(const OracleOutput& whole, const AttentionShape& shape,
                                   std::span<const PositionRanges> index);

/// Output [b,t,n,Dv], rounded to `dtype`, and LSE [b,n,t], float32, as numbers to compare.
[[nodiscard]] OracleOutput numbers_of(const ConstTensorView& output, const ConstTensorView& lse,
                                      DType dtype);

/// How far results are from the reference's.
struct ReferenceDeviation {
  double output = 0;   ///< relative Frobenius error
  double element = 0;  ///< largest difference of an element
  double lse = 0;      ///< largest difference beyond the rounding of the reference's LSE
};

[[nodiscard]] ReferenceDeviation deviation(const OracleOutput& actual, const OracleOutput& expected,
                                           DType lse_dtype);

/// The bounds of docs/semantics.md §6 for one implementation, and one for each element: the
/// fixtures' values are about 1.
[[nodiscard]] ReferenceDeviation bound_of(const ReferenceCase& reference);

[[nodiscard]] bool agrees(const ReferenceDeviation& deviation, const ReferenceDeviation& bound);

/// The same, with a message that states the numbers.
void expect_agrees(const OracleOutput& actual, const OracleOutput& expected,
                   const ReferenceCase& reference);

}  // namespace annulus::test
