#pragma once

#include <annulus/attention/oracle_gradients.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/sharded_operands.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::verification {

/// The entries that the gradients of query, key, value and bias may have together, as every rank
/// holds the oracle's of the whole problem: 16 bytes for each (24 of the bias), and as many again
/// while they are computed.
inline constexpr std::int64_t kMaxGradientEntries = std::int64_t{1} << 26U;

/// Throws ArgumentError where the oracle's gradients would have more entries than that.
void check_gradients_fit(const AttentionProblem& problem, const ring::BackwardRequest& request);

/// The oracle's gradients of the whole problem. Each rank computes those of some rows, with so many
/// threads, and they add up. Collective: the same on all ranks.
[[nodiscard]] OracleGradients whole_gradients(const ShardedCase& sharded_case, Control& ranks,
                                              int threads, const Phase& phase);

}  // namespace annulus::verification
