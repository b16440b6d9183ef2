#pragma once

#include <vector>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

/// What the transfers of a rank's steps wait for, besides those of earlier steps.
struct StepDependencies {
  /// By step: it receives into memory that an earlier step computes on.
  std::vector<bool> overwrites;
  /// By step: it sends what an earlier one has received. What others send of a rank's own columns
  /// is there from the beginning.
  std::vector<bool> forwards;
};

[[nodiscard]] StepDependencies find_dependencies(const RankPlan& plan);

}  // namespace annulus::ring
