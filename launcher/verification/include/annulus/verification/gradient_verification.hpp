#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include <annulus/ring/planner.hpp>
#include <annulus/verification/failure.hpp>

namespace annulus::verification {

/// Errors of the gradients of query, key, value, sinks and bias over all ranks, each relative to
/// the norm of the magnitudes of docs/semantics.md §6. 0 if both are 0; NaN is within no bound.
using GradientErrors = std::array<double, 5>;

/// The result of verify_sharded() for the backward pass: the same on every rank.
struct GradientVerification {
  ring::BackwardRequest request;
  /// Why no implementation computes the gradients; other members are then not set. Empty if one
  /// does.
  std::string refusal = {};
  ring::ScheduleChoice schedule;
  std::string implementations;  ///< see Verification::implementations
  /// Twice the output's bound; for float64, that of float32, since gradients are computed from an
  /// LSE in float32.
  double bound = 0;
  /// The plan adds parts of keys' and values' gradients that were rounded for sending
  /// (ring::PlanOptions::grad_wire). One more rounding is then allowed, added in squares.
  bool adds_rounded = false;
  GradientErrors sharded = {};
  GradientErrors unsharded = {};  ///< of the same implementation, given both sequences at once
  /// The largest errors allowed relative to the unsharded run. Infinite for gradients of few
  /// numbers, which are not compared: of sinks, and of a bias without rows or keys. None for
  /// float64.
  std::optional<GradientErrors> allowance = {};
  bool repeats = true;  ///< a second call gave the same bits, if the plan promises them
  /// A rank added gradients that its kernel had rounded to the problem's dtype.
  bool reduces_rounded = false;
  /// The unsharded run gave the same bits, if the problem asks for them.
  bool reproduces = true;

  /// The largest error, as a share of the bound.
  [[nodiscard]] double share() const;
  /// The largest error over that of the unsharded run; 1 if both are 0, nothing if they are not
  /// compared.
  [[nodiscard]] std::optional<double> ratio() const;
  /// The first error that is too large, and bits that differ; empty if nothing is wrong.
  [[nodiscard]] std::vector<Failure> failures() const;
};

}  // namespace annulus::verification
