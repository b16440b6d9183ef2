#pragma once

#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::ring {

/// A problem laid out in one way.
struct LaidOut {
  ShardedOperands operands;
  CostModel model;  ///< with the transport that the ranks would take
};

/// The forward pass of some options, for ranks that need not exist, as Attention would plan it.
class PlannedProblem {
 public:
  /// Refers to `registry`. `node_of_rank` as in Prices; `presence` says whether `place` is of this
  /// machine. Throws UserErrors for names that are unknown, and for what the implementation cannot
  /// compute.
  PlannedProblem(const AttentionOptions& options, const Registry& registry, Place place,
                 Presence presence, std::vector<int> node_of_rank);

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
  std::vector<const Implementation*> implementations_;
  std::string schedule_;
};

}  // namespace annulus::ring
