#pragma once

#include <cstdint>
#include <string_view>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// The parts of a mask that apply if there is a bias (docs/semantics.md §1).
enum class BiasPolicy : std::uint8_t {
  combine,              ///< all: mask and bias both apply
  bias_wins,            ///< none: the whole mask is ignored
  bias_disables_causal  ///< all but the causal part
};

[[nodiscard]] std::string_view name_of(BiasPolicy policy) noexcept;
/// Throws ArgumentError("bias policy", …) for an unknown name.
[[nodiscard]] BiasPolicy parse_bias_policy(std::string_view name);

/// The part of the mask that applies if there is a bias.
[[nodiscard]] Mask mask_beside_bias(BiasPolicy policy, const Mask& mask);
/// The problem with the policy applied to its mask and its dense mask; unchanged without a bias.
[[nodiscard]] AttentionProblem under_policy(BiasPolicy policy, AttentionProblem problem);

}  // namespace annulus
