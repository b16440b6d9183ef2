#pragma once

#include <cstdint>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/verification/operand_fills.hpp>

namespace annulus::verification {

/// `fills` with keys and values that are not finite (docs/semantics.md §1): NaN, ∞ and −∞ where no
/// query sees them, which must affect nothing; and in one batch, for each key/value head, NaN in an
/// entry of a key and of a value that some queries see and at least as many do not, which must
/// reach just those. For small problems: it asks the mask about every pair. On GPUs, values behind
/// kv_lengths stay finite, as cuDNN multiplies with them.
[[nodiscard]] OperandFills with_non_finite_columns(const AttentionProblem& problem,
                                                   OperandFills fills, std::uint64_t seed,
                                                   Place::Kind device);

}  // namespace annulus::verification
