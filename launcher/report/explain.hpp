#pragma once

#include <ostream>
#include <string_view>

#include <annulus/attention/registry.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// What --explain adds to a report: what was chosen, and why the rest was passed over.
void explain(const Selection& selection, Report& report);
void explain(const ring::ScheduleChoice& choice, Report& report);

/// A plan as "# " lines, with the steps of the first `ranks` ranks.
void print_plan(const ring::Plan& plan, int ranks, std::ostream& out);

}  // namespace annulus::launcher
