#pragma once

#include <optional>
#include <string>

#include <annulus/core/place.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/verification/random_problem.hpp>

#include "draws.hpp"

namespace annulus::verification {

/// True if the schedule, by name, plans the problem as it is drawn so far: the forward pass, or the
/// backward pass.
[[nodiscard]] bool is_planned(const RandomProblem& drawn, const std::string& schedule,
                              const std::optional<ring::BackwardRequest>& backward = {},
                              DType grad_wire = DType::float32);

/// Draws the backward pass of a problem that is drawn otherwise. The draws come last, so that
/// problems stay what they are.
void draw_backward(Draws& draws, RandomProblem& drawn, int kv_shards, Place::Kind device);

}  // namespace annulus::verification
