#pragma once

#include <optional>
#include <ostream>
#include <string_view>

#include <annulus/attention/registry.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/prices.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// Adds lines of --explain to a report: the schedule and why, then why others were passed over.
void explain(const ring::ScheduleChoice& choice, Report& report);
/// Adds the sources of predictions.
void explain(const ring::Prices& prices, Report& report);
/// Adds all lines: the implementation and the schedule chosen, the link of the tuning chain that
/// decided, the ones passed over, and the sources of predictions.
void explain(const Selection& selection, const ring::ScheduleChoice& choice,
             const ring::Decision& decision, const ring::Prices& prices, Report& report);
void explain(const Attention& attention, Report& report);

/// Measured seconds of a call whose bits are the same on any number of ranks, and of one whose bits
/// need not be.
struct MeasuredPrice {
  double seconds = 0;
  double unrestricted = 0;
};

/// For a problem whose bits must be the same on any number of ranks: adds the predicted time of the
/// schedule, and of the one that would be taken otherwise; also their measured times, if there are
/// any. `pass`: "forward" or "backward".
void add_price_of_order(const ring::ScheduleChoice& choice, std::string_view pass, Report& report,
                        const std::optional<MeasuredPrice>& measured = {});

/// Logs what was chosen and why: the main steps on rank 0 (info), and each rank's shards (debug).
/// Collective over the mesh.
void log_choices(const AttentionProblem& problem, const Attention& attention, const Mesh& mesh);

/// A plan as "# " lines, with the steps of the first `ranks` ranks.
void print_plan(const ring::Plan& plan, int ranks, std::ostream& out);

}  // namespace annulus::launcher
