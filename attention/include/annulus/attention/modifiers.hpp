#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// Something that a problem asks for beside shape, dtype and mask.
struct Modifier {
  std::string text;          ///< "sinks [8, 2]"
  std::string kind;          ///< as far as it decides how long a call takes: "2 sinks"; else empty
  std::uint64_t digest = 0;  ///< of what the text leaves out
};

/// All that the problem sets, in the order of its texts. Everything that tells problems apart
/// (reports, what ranks agree on, tuning keys) is made from this list.
[[nodiscard]] std::vector<Modifier> modifiers_of(const AttentionProblem& problem);

/// The text of a problem's settings beside its mask: "dense mask [1, 1, 8, 8], scale 0.5, soft cap
/// 20, bias
/// [1, 8, 8, 8], sinks [8, 2], dropout 0.25, seed 5, unnormalised, softmax float64, weights, call
/// arguments lengths", less what it does not set; "none" if it sets nothing.
[[nodiscard]] std::string modifiers_text(const AttentionProblem& problem);

/// All masks, followed by any modifiers: "causal", "none, soft cap 20", "dense mask [1, 1, 8, 8]".
[[nodiscard]] std::string mask_and_modifiers_text(const AttentionProblem& problem);

}  // namespace annulus
