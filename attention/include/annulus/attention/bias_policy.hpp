#pragma once

#include <cstdint>
#include <string_view>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// What becomes of the mask of a problem that has a bias (docs/semantics.md §1).
enum class BiasPolicy : std::uint8_t {
  combine,              ///< both apply
  bias_wins,            ///< the mask is ignored, all parts of it
  bias_disables_causal  ///< only its causal part is
};

[[nodiscard]] std::string_view name_of(BiasPolicy policy) noexcept;
/// Throws ArgumentError("bias policy", …) for an unknown name.
[[nodiscard]] BiasPolicy parse_bias_policy(std::string_view name);

/// What the policy leaves of a mask where there is a bias.
[[nodiscard]] Mask mask_beside_bias(BiasPolicy policy, const Mask& mask);
/// The problem under the policy, dense mask included. Without a bias it is the same.
[[nodiscard]] AttentionProblem under_policy(BiasPolicy policy, AttentionProblem problem);

}  // namespace annulus
