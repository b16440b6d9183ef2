#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include <annulus/attention/registry.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/simulate.hpp>

#include "launcher/options/options.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {

/// A problem laid on a mesh of ranks that need not exist.
struct PlannedCase {
  ProblemSetup setup;
  ring::ShardedOperands operands;
  Selection selection;  ///< of implementations; it need not be this machine that computes
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

/// The value of the first line, "device", of a plan that assumes CPUs because --device is not
/// given; empty for other plans.
[[nodiscard]] std::string assumed_device(const Options& options);

/// Adds the line "device" to a report, if the plan assumes CPUs.
void add_assumed_device(Report& report, const Options& options);

/// Completes --ranks, --nodes, --ranks-per-node and --mesh from each other. The results have the
/// number of ranks and the ranks per node, if they follow, and a mesh with all sizes. Throws
/// ArgumentErrors if the options contradict each other. With --scaling and --recommend, only a mesh
/// from the command line counts.
[[nodiscard]] Options with_ranks(Options options);

/// Facts about a plan, for each row of a record: program, options, shape, dtype, mask and device.
[[nodiscard]] Record planned_record(const Options& options, const AttentionProblem& problem);

/// "12.3": a predicted time in milliseconds, without digits that a prediction does not know.
[[nodiscard]] std::string predicted_cell(double seconds);

/// Each time is the largest one of all ranks.
[[nodiscard]] ring::RankTimeline most_of(const std::vector<ring::RankTimeline>& timelines);

/// ", between nodes 45 GB/s per rank and 360 GB/s per node (assumed)"; empty for one node.
[[nodiscard]] std::string network_text(const ring::CostModel& model, bool several_nodes);

/// The node of each rank. With --ranks-per-node, consecutive ranks share a node; else the ranks
/// with the same coordinate on the axis "node", if the mesh has one; else all, which is an empty
/// list. Throws ArgumentError if --ranks-per-node is less than the number of ranks and does not
/// divide it.
[[nodiscard]] std::vector<int> planned_nodes(const Options& options, const MeshShape& mesh);

/// The basis of predictions for several cases: the model's source, the cases' transports, and the
/// network between nodes.
[[nodiscard]] std::string predictor_text(const ring::CostModel& model,
                                         const std::set<std::string>& transports,
                                         bool several_nodes);

/// Settles everything but the schedule. Throws UserErrors.
[[nodiscard]] PlannedCase lay_out_case(const Options& options, const Registry& registry);

/// Settles the schedule of a case. Throws UserErrors.
void settle_schedule(PlannedCase& planned, const Options& options, const Registry& registry);

/// True if some rank adds parts of gradients that were rounded for sending.
[[nodiscard]] bool adds_rounded_gradients(const ring::Plan& plan);

/// Warnings of options without effect, and of blocks that only the plain kernel computes on GPUs.
/// `plan`: of some ranks of a case whose schedule is settled.
[[nodiscard]] std::vector<std::string> warnings_of(const PlannedCase& planned,
                                                   const ring::Plan& plan, const Options& options);

}  // namespace annulus::launcher
