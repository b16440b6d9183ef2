#pragma once

#include <array>
#include <optional>
#include <string>

#include <annulus/ring/planner.hpp>

namespace annulus::verification {

/// Errors of the gradients of query, key, value, sinks and bias, each relative to the norm of the
/// magnitudes that docs/semantics.md §6 names, over all ranks. 0 if both are 0; NaN is within no
/// bound.
using GradientErrors = std::array<double, 5>;

/// The result of verify_sharded() for the backward pass: the same on every rank.
struct GradientVerification {
  ring::BackwardRequest request;
  /// Why no implementation computes the gradients; the rest is then not set. Empty if some does.
  std::string refusal = {};
  ring::ScheduleChoice schedule;
  std::string implementations;  ///< see Verification::implementations
  /// Twice that of the output, of float32 for float64: gradients are computed from an LSE in
  /// float32.
  double bound = 0;
  /// The plan adds up parts of keys' and values' gradients that were rounded for their way
  /// (ring::PlanOptions::grad_wire). One rounding more is then allowed, added in squares.
  bool adds_rounded = false;
  GradientErrors sharded = {};
  GradientErrors unsharded = {};  ///< of the same implementation, given both sequences at once
  /// The largest errors allowed by comparison with the unsharded run; infinite for what is not
  /// compared: the few numbers of the sinks, and of a bias without rows or keys of its own. None
  /// for float64.
  std::optional<GradientErrors> allowance = {};
  bool repeats = true;  ///< a second call gave the same bits, where the plan promises that
  /// Some rank added up gradients that its kernel had rounded to the problem's dtype.
  bool reduces_rounded = false;
  /// The unsharded run gave the same bits, where the problem asks for that.
  bool reproduces = true;

  /// The largest error, as a share of the bound.
  [[nodiscard]] double share() const;
  /// The largest error over that of the unsharded run, 1 if neither has any; nothing where they are
  /// not compared.
  [[nodiscard]] std::optional<double> ratio() const;
  /// Names the first thing that is wrong, in a few words; empty if nothing is.
  [[nodiscard]] std::string failure() const;
};

}  // namespace annulus::verification
