#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/options/options.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {

/// A problem laid on a mesh of ranks that need not exist.
struct PlannedCase {
  ProblemSetup setup;
  ring::ShardedOperands operands;
  std::vector<const Implementation*> candidates;
  Place place;
  ring::CostModel model;  ///< its transport is the one of ranks on these nodes under --transport
  std::vector<int> node_of_rank;  ///< see ring::Prices
  ring::PlanOptions how;          ///< with the decisions of `choice`
  ring::ScheduleChoice choice;
  /// Plans of the backward pass; without a value, of the forward pass.
  std::optional<ring::BackwardRequest> backward = {};

  /// The planner's input for this problem, laid out as given.
  [[nodiscard]] ring::PlanInput input(const ring::ShardedOperands& laid_out) const;
  [[nodiscard]] ring::PlanInput input() const { return input(operands); }
};

/// The place of ranks that need not exist; the user says which.
[[nodiscard]] Place planned_place(const Options& options);

/// The node of each rank. With --ranks-per-node, consecutive ranks share a node; else the ranks
/// with the same coordinate on the axis "node", if the mesh has one; else all, which is an empty
/// list. Throws ArgumentError if --ranks-per-node is less than the number of ranks and does not
/// divide it.
[[nodiscard]] std::vector<int> planned_nodes(const Options& options, const MeshShape& mesh);

/// The basis of predictions for several cases: the model's source and the cases' transports.
[[nodiscard]] std::string predictor_text(const ring::CostModel& model,
                                         const std::set<std::string>& transports);

/// Settles everything but the schedule. Throws UserErrors.
[[nodiscard]] PlannedCase lay_out_case(const Options& options, const Registry& registry);

/// Settles the schedule of a case. Throws UserErrors.
void settle_schedule(PlannedCase& planned, const Options& options, const Registry& registry);

}  // namespace annulus::launcher
