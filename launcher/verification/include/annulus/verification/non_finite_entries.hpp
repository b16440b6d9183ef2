#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// `fills` with some queries, keys and values that are not finite (docs/semantics.md §1). Keys and
/// values that no query sees are NaN, ∞ and −∞, which must affect nothing. In one batch, for each
/// key/value head, one entry of a key and one of a value are NaN, ∞ or −∞, at a position that some
/// queries see and at least as many do not. In half of the cases one entry of a query is not finite
/// either. Such entries must reach only the rows that see them: see compare(). Only for small
/// problems, as the mask is asked about every pair.
///
/// The right result does not depend on the order of computing. If a key and a value have the same
/// position, the key's entry is NaN, since with an infinite one the value might have no weight. A
/// query's entry is NaN too if there are sinks. On GPUs, visible entries of queries and keys are
/// always NaN, as kernels for tensor cores may turn an infinite logit into NaN. Values and queries
/// stay finite if cuDNN may compute, as it multiplies hidden values by 0.
[[nodiscard]] OperandFills with_non_finite_entries(const AttentionProblem& problem,
                                                   OperandFills fills, std::uint64_t seed,
                                                   Place::Kind device);

}  // namespace annulus::verification
