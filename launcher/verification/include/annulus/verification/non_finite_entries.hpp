#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// `fills` with keys and values that are not finite (docs/semantics.md §1). Those that no query
/// sees are NaN, ∞ and −∞, which must affect nothing. In one batch, for each key/value head, one
/// entry of a key and one of a value are NaN, where some queries see the position and at least as
/// many do not; the NaN must reach only those that do. For small problems: it asks the mask about
/// every pair. On GPUs, values stay finite where cuDNN may compute, as it multiplies hidden ones by
/// 0.
[[nodiscard]] OperandFills with_non_finite_columns(const AttentionProblem& problem,
                                                   OperandFills fills, std::uint64_t seed,
                                                   Place::Kind device);

}  // namespace annulus::verification
