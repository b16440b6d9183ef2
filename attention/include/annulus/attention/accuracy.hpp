#pragma once

#include <cstdint>

#include <annulus/core/dtype.hpp>

namespace annulus {

/// The deviation from the oracle that docs/semantics.md §6 allows.
struct AccuracyBound {
  double output = 0;  ///< relative Frobenius error of the output
  double lse = 0;     ///< largest absolute error of the LSE
};

[[nodiscard]] AccuracyBound accuracy_bound(DType dtype, std::int64_t kv_length);

/// A sharded run may have at most this times the error of the same implementation unsharded.
inline constexpr double kShardedErrorFactor = 1.1;

}  // namespace annulus
