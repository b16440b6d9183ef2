#pragma once

#include <string>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// What a problem asks for beside its mask: "dense mask [1, 1, 8, 8], scale 0.5, soft cap 20, bias
/// [1, 8, 8, 8], sinks [8, 2], dropout 0.25, seed 5, unnormalised, softmax float64", less what it
/// does not set; "none" if it sets nothing.
[[nodiscard]] std::string modifiers_text(const AttentionProblem& problem);

/// All masks, followed by any modifiers: "causal", "none, soft cap 20", "dense mask [1, 1, 8, 8]".
[[nodiscard]] std::string mask_and_modifiers_text(const AttentionProblem& problem);

}  // namespace annulus
