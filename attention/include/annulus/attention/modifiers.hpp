#pragma once

#include <string>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// What a problem asks for beside its mask: "scale 0.5, soft cap 20, sinks [8, 2], dropout 0.25,
/// seed 5, unnormalised", less what it does not set; "none" if it sets nothing.
[[nodiscard]] std::string modifiers_text(const AttentionProblem& problem);

/// The mask, followed by any modifiers: "causal", "causal, soft cap 20".
[[nodiscard]] std::string mask_and_modifiers_text(const AttentionProblem& problem);

}  // namespace annulus
