#pragma once

#include <vector>

#include <annulus/mesh/control.hpp>
#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// The form of a refusal that stands for its class: see Refusal.
[[nodiscard]] Refusal class_of(const AttentionProblem& problem, Refusal refusal);

/// The classes that any rank refuses, each once, on every rank. Collective. They are merged along
/// the tree of the ranks, so that no rank sees the P² blocks of all ranks.
[[nodiscard]] std::vector<Refusal> refusals_of_all(Control& ranks, const AttentionProblem& problem,
                                                   const std::vector<Refusal>& refusals);

}  // namespace annulus::ring
