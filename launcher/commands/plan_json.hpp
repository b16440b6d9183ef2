#pragma once

#include <string>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/prices.hpp>
#include <annulus/ring/simulate.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// A plan of more ranks than this is written without tasks.
inline constexpr int kRanksWithTasks = 64;

/// All that annulus plan shows and more, as JSON with the schema "annulus.plan": the fields of
/// ring::to_json(); "predicted_ms" of each rank and of the slowest; "rates", the sources of the
/// prediction by implementation; "schedules" with the reasons for and against; "layouts", the rows
/// of the table of layouts. For a large mesh it holds only the sampled ranks ("ranks_left_out").
[[nodiscard]] std::string plan_json(const ring::Plan& plan, const ring::Prices& prices,
                                    const ring::ScheduleChoice& choice, const Report& layouts);

}  // namespace annulus::launcher
