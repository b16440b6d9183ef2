#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>

namespace annulus {

/// A setting of a problem besides shape, dtype and mask.
struct Modifier {
  std::string text;          ///< "sinks [8, 2]"
  std::string kind;          ///< the part that affects a call's time: "2 sinks"; may be empty
  std::uint64_t digest = 0;  ///< of data that the text leaves out
};

/// All settings of the problem, in the order of texts. Reports, agreement between ranks and tuning
/// keys are made from this list.
[[nodiscard]] std::vector<Modifier> modifiers_of(const AttentionProblem& problem);

/// The text of a problem's settings beside its mask: "dense mask [1, 1, 8, 8], scale 0.5, soft cap
/// 20, bias [1, 8, 8, 8], sinks [8, 2], dropout 0.25, seed 5, unnormalised, softmax float64,
/// weights, call arguments lengths", without absent settings; "none" if there are none.
[[nodiscard]] std::string modifiers_text(const AttentionProblem& problem);

/// All masks, followed by any modifiers: "causal", "none, soft cap 20", "dense mask [1, 1, 8, 8]".
[[nodiscard]] std::string mask_and_modifiers_text(const AttentionProblem& problem);

}  // namespace annulus
