#pragma once

#include <optional>
#include <string>

#include <annulus/core/place.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/verification/random_problem.hpp>

#include "draws.hpp"

namespace annulus::verification {

/// True if the named schedule can plan the forward or backward pass of the problem as drawn so far.
[[nodiscard]] bool is_planned(const RandomProblem& drawn, const std::string& schedule,
                              const std::optional<ring::BackwardRequest>& backward = {},
                              DType grad_wire = DType::float32);

/// The schedule that can plan every problem, and every backward pass that another schedule can.
[[nodiscard]] std::string plain_schedule(int kv_shards);

/// Draws the backward pass of an otherwise complete problem. Its draws come last, so that they do
/// not change other parts of problems.
void draw_backward(Draws& draws, RandomProblem& drawn, int kv_shards, Place::Kind device);

}  // namespace annulus::verification
