#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/dtype.hpp>

namespace annulus {

/// The deviation from the oracle that docs/semantics.md §6 allows.
struct AccuracyBound {
  double output = 0;  ///< relative Frobenius error of the output
  double lse = 0;     ///< largest absolute error of the LSE
};

[[nodiscard]] AccuracyBound accuracy_bound(DType dtype, std::int64_t kv_length);
/// That of a problem's output. An unnormalised one is judged with its sum, which is float32.
[[nodiscard]] AccuracyBound accuracy_bound(const AttentionProblem& problem);

/// The largest permitted ratio of a sharded run's output error to that of the same implementation
/// unsharded (docs/semantics.md §6). It depends on the number of output elements: with few of them
/// the ratio is mostly noise.
[[nodiscard]] double sharded_error_factor(std::int64_t output_elements);

}  // namespace annulus
