#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/prices.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus::verification {

/// One way in which a problem failed.
struct Failure {
  enum class Kind : std::uint8_t {
    bound,         ///< an error is above its bound against the oracle
    ratio,         ///< an error is too large beside that of the unsharded run
    repetition,    ///< a repeated run gave different bits
    reproduction,  ///< the unsharded run gave different bits
  };
  Kind kind;
  std::string text;  ///< in a few words
};

/// Findings of verify_sharded() about either pass, the same on every rank.
struct PassFindings {
  ring::ScheduleChoice schedule;
  ring::Decision decision;
  Selection selection;  ///< points into the registry
  ring::Prices prices;  ///< that the schedule was chosen by
  /// The implementations of all ranks' blocks, joined by "+"; "none" without blocks.
  std::string implementations;
  bool repeats = true;  ///< a second call gave the same bits, if they are promised
  /// The unsharded run gave the same bits, if the problem asks for them (Reproducible::world).
  bool reproduces = true;
  /// A rank reduced results that its kernel had rounded to the problem's dtype.
  bool reduces_rounded = false;

 protected:
  /// Adds a failure for bits that differ. `pass`: "run" or "backward pass".
  void add_differing_bits(std::vector<Failure>& all, const std::string& pass) const {
    if (!repeats) {
      all.push_back({Failure::Kind::repetition, "a repeated " + pass + " gave different bits"});
    }
    if (!reproduces) {
      all.push_back(
          {Failure::Kind::reproduction, "the unsharded " + pass + " gave different bits"});
    }
  }
};

/// Errors of the gradients of query, key, value, sinks and bias over all ranks, each relative to
/// the norm of the magnitudes of docs/semantics.md §6. 0 if both are 0; NaN is within no bound.
using GradientErrors = std::array<double, 5>;

/// The result of verify_sharded() for the backward pass: the same on every rank.
struct GradientVerification : PassFindings {
  ring::BackwardRequest request;
  /// Why no implementation computes the gradients; other members are then not set. Empty if one
  /// does.
  std::string refusal = {};
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

  /// The largest error, as a share of the bound.
  [[nodiscard]] double share() const;
  /// The largest error over that of the unsharded run; 1 if both are 0, nothing if they are not
  /// compared.
  [[nodiscard]] std::optional<double> ratio() const;
  /// The first error that is too large, and bits that differ; empty if nothing is wrong.
  [[nodiscard]] std::vector<Failure> failures() const;
};

}  // namespace annulus::verification
