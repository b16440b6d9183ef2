#pragma once

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// The most entries of the gradients of query, key, value and bias together. Every rank holds the
/// oracle's of the whole problem: 16 bytes for each (24 for the bias), and as many again during the
/// computation.
inline constexpr std::int64_t kMaxGradientEntries = std::int64_t{1} << 26U;

/// Throws ArgumentError if the oracle's gradients would have more entries.
void check_gradients_fit(const AttentionProblem& problem, const ring::BackwardRequest& request);

/// The oracle's gradients of the whole problem. Each rank computes the gradients of some rows, with
/// this many threads; their sum is the same on all ranks. Collective.
[[nodiscard]] OracleGradients whole_gradients(const ShardedCase& sharded_case, Control& ranks,
                                              int threads, const Phase& phase);

}  // namespace annulus::verification
