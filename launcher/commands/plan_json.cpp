#include "launcher/commands/plan_json.hpp"

#include <cstddef>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "launcher/planning/planned_case.hpp"

namespace annulus::launcher {
namespace {

using nlohmann::json;

// A rank without its tasks.
json short_rank(const ring::RankPlan& rank) {
  return {{"rank", rank.rank},
          {"work", rank.work()},
          {"bytes_sent", rank.bytes_sent()},
          {"bytes_received", rank.bytes_received()},
          {"exchange_buffer_bytes", rank.buffer_bytes(ring::BufferKind::exchange)}};
}

json with_tasks(const ring::Plan& plan) {
  return json::parse(ring::to_json(plan));
}

json without_tasks(const ring::Plan& plan) {
  json result = with_tasks({plan.problem,
                            plan.mesh,
                            plan.schedule,
                            plan.layout,
                            {},
                            plan.most_work,
                            plan.mean_work,
                            plan.ulysses_degree,
                            plan.inner_size,
                            plan.backward});
  for (const ring::RankPlan& rank : plan.ranks) result["ranks"].push_back(short_rank(rank));
  return result;
}

json milliseconds(const ring::RankTimeline& timeline) {
  return {{"compute", timeline.compute * 1e3},
          {"transfer", timeline.transfer * 1e3},
          {"wait", timeline.exposed * 1e3},
          {"finish", timeline.finish * 1e3}};
}

// 0 seconds means not predicted.
json predicted(double seconds) {
  return seconds > 0 ? json(seconds * 1e3) : json(nullptr);
}

json variant_json(const ring::ScheduleVariant& variant, bool chosen, double seconds) {
  json result{{"name", ring::name_of(variant.schedule)},
              {"chosen", chosen},
              {"predicted_ms", predicted(seconds)}};
  if (variant.ulysses_degree > 0) result["ulysses_degree"] = variant.ulysses_degree;
  if (variant.inner_size > 0) result["inner_size"] = variant.inner_size;
  return result;
}

json schedules_json(const ring::ScheduleChoice& choice) {
  json schedules = json::array({variant_json(choice, true, choice.seconds)});
  for (const auto& other : choice.passed_over) {
    schedules.push_back(variant_json(other, false, other.seconds));
    schedules.back()["passed_over"] = other.reason;
  }
  return schedules;
}

}  // namespace

std::string plan_json(const ring::Plan& plan, const ring::Prices& prices,
                      const ring::ScheduleChoice& choice, const Report& layouts) {
  const bool compact = plan.mesh.ranks() > kRanksWithTasks;
  json result = compact ? without_tasks(plan) : with_tasks(plan);
  result["schema"] = "annulus.plan";
  result["tasks_left_out"] = compact;
  result["ranks_left_out"] = plan.is_sample();
  const std::vector<ring::RankTimeline> timelines = ring::simulate(plan, prices);
  for (std::size_t i = 0; i < timelines.size(); ++i) {
    result["ranks"][i]["predicted_ms"] = milliseconds(timelines[i]);
  }
  result["predicted_ms"] = milliseconds(most_of(timelines));
  result["predicted_by"] = fmt::format("{}; rates: {}", prices.model.source, prices.knowledge());
  for (const auto& [name, cost] : prices.kernels) result["rates"][name] = cost.source;
  result["schedules"] = schedules_json(choice);
  const json compared = layouts.to_json();
  result["layouts"] = compared["rows"];
  result["layout_columns"] = compared["columns"];
  for (const auto& [key, value] : layouts.about()) {
    if (key == "options" || key == "device" || key == "mask") result[key] = value;
  }
  return result.dump(1);
}

}  // namespace annulus::launcher
