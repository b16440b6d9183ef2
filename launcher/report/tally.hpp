#pragma once

#include <map>
#include <optional>
#include <string>

#include <annulus/verification/verification.hpp>

#include "launcher/report/cells.hpp"

namespace annulus::launcher {

/// Counts the findings of `annulus verify`, and keeps the worst ratio and shares of bounds.
class Tally {
 public:
  void add(const verification::Verification& found);
  /// Counts a problem that ended with an error.
  void add_refused();
  /// Counts a drawn problem that nothing computes with the same bits on any number of ranks.
  void add_unordered() { ++unordered_; }

  [[nodiscard]] bool passed() const { return failed_ == 0; }
  /// The number of problems that each implementation, or several together, computed: "native 3,
  /// sdpa 5".
  [[nodiscard]] std::string computed() const { return counts_text(computed_); }
  /// The same for gradients.
  [[nodiscard]] std::string computed_gradients() const { return counts_text(computed_gradients_); }
  /// "OK (8 of 8 within bounds; …)", or "FAILED (8 of 8 within bounds, 1 with different bits in a
  /// repeated run; …)", with the number of problems for each kind of failure.
  [[nodiscard]] std::string text() const;

 private:
  using Counts = std::map<std::string, int>;

  int problems_ = 0;
  int failed_ = 0;
  int within_bounds_ = 0;
  std::map<verification::Failure::Kind, int> failures_;  // problems with each kind
  int refused_ = 0;
  int unordered_ = 0;
  int reduces_rounded_ = 0;
  int adds_rounded_ = 0;
  std::optional<double> worst_ratio_;
  double row_share_ = 0;
  double lse_share_ = 0;
  std::optional<double> gradient_share_;
  std::optional<double> gradient_ratio_;
  Counts computed_;
  Counts computed_gradients_;
};

}  // namespace annulus::launcher
