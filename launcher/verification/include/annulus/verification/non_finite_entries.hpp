#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// `fills` with queries, keys and values that are not finite (docs/semantics.md §1). Keys and
/// values that no query sees are NaN, ∞ and −∞, which must affect nothing. In one batch, for each
/// key/value head, one entry of a key and one of a value are NaN, ∞ or −∞, where some queries see
/// the position and at least as many do not; in half of all cases one entry of a query is, too.
/// These must reach only the rows that see them: see compare(). For small problems: it asks the
/// mask about every pair.
///
/// What is drawn has one right result in any order of computing. Where a key and a value have the
/// same position, the key's entry is NaN, as an infinite one might have no weight there; so is that
/// of a query beside sinks. On GPUs, entries of queries and keys that some row sees are NaN at all
/// times, as kernels for tensor cores may make NaN of an infinite logit; and values, and queries,
/// stay finite where cuDNN may compute, as it multiplies hidden values by 0.
[[nodiscard]] OperandFills with_non_finite_entries(const AttentionProblem& problem,
                                                   OperandFills fills, std::uint64_t seed,
                                                   Place::Kind device);

}  // namespace annulus::verification
