#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// A problem laid out in one way.
struct LaidOut {
  ShardedOperands operands;
  CostModel model;  ///< with the transport that the ranks would take
};

/// One pass of attention with some options, as Attention would plan it, for ranks that need not
/// exist.
class PlannedProblem {
 public:
  /// Refers to `registry`. `node_of_rank` as in Prices; `presence` says whether `place` is of this
  /// machine. It is the forward pass unless there is a request. Throws UserErrors for names
  /// that are unknown, and for what the implementation cannot compute.
  PlannedProblem(const AttentionOptions& options, const Registry& registry, Place place,
                 Presence presence, std::vector<int> node_of_rank,
                 std::optional<BackwardRequest> backward = {});

  /// The options, with the problem that is computed: see problem_of().
  [[nodiscard]] const AttentionOptions& options() const noexcept { return options_; }
  /// The schedule that the options or the implementation name, or "auto".
  [[nodiscard]] const std::string& schedule() const noexcept { return schedule_; }

  /// Throws UserErrors if the problem does not fit the mesh.
  [[nodiscard]] LaidOut lay_out(const MeshShape& mesh, const LayoutOptions& asked) const;
  /// Refers to this object and to `laid_out`.
  [[nodiscard]] PlanInput input(const LaidOut& laid_out) const;

 private:
  AttentionOptions options_;
  Place place_;
  std::vector<int> node_of_rank_;
  std::optional<BackwardRequest> backward_;
  std::vector<const Implementation*> implementations_;
  std::string schedule_;
};

/// Finds the fastest of the schedules that are open, simulating as few as possible.
class VariantSearch {
 public:
  /// The problem and the operands of `input` must outlive it.
  VariantSearch(const PlanInput& input, const std::string& schedule);

  /// A lower bound of the seconds of all schedules; infinite if none can run.
  [[nodiscard]] double least() const;
  /// The fastest and its run; nothing if none is certain to take less than `limit` seconds.
  [[nodiscard]] std::optional<std::pair<ScheduleVariant, PredictedRun>> fastest(double limit);

 private:
  using Variants = std::vector<std::pair<PredictedRun, ScheduleVariant>>;  // by seconds

  static void sort(Variants& variants);

  PlanInput input_;
  Predictor predictor_;
  Variants variants_;  // with their lower bounds
};

}  // namespace annulus::ring
