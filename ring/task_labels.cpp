#include "task_labels.hpp"

#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>

namespace annulus::ring {
namespace {

using Named = std::pair<TraceCategory, std::string>;

Named named(const RankPlan& /*plan*/, const Copy& /*copy*/) {
  return {TraceCategory::other, "copy"};
}
Named named(const RankPlan& plan, const Exchange& exchange) {
  return {TraceCategory::transfer, contents_of(plan, exchange)};
}
Named named(const RankPlan& plan, const Block& block) {
  return {TraceCategory::kernel, plan.implementation_of(block)};
}
Named named(const RankPlan& /*plan*/, const Reduce& /*reduce*/) {
  return {TraceCategory::merge, "reduce"};
}
Named named(const RankPlan& /*plan*/, const Delta& /*delta*/) {
  return {TraceCategory::other, "delta"};
}
Named named(const RankPlan& /*plan*/, const SinkGradient& /*gradient*/) {
  return {TraceCategory::other, "sink gradient"};
}
Named named(const RankPlan& plan, const BackwardBlock& block) {
  return {TraceCategory::kernel, plan.implementation_of(block) + " backward"};
}

}  // namespace

std::string contents_of(const Buffer& buffer) {
  std::vector<std::string_view> names;
  for (const Content content : buffer.contents) names.push_back(name_of(content));
  return fmt::format("{}", fmt::join(names, "/"));
}

std::string contents_of(const RankPlan& plan, const Exchange& exchange) {
  const std::vector<Transfer>& some = exchange.sends.empty() ? exchange.receives : exchange.sends;
  return some.empty() ? "nothing" : contents_of(plan.buffer(some.front().buffer));
}

TraceLabel trace_label(const RankPlan& plan, const Task& task) {
  auto [category, name] =
      std::visit([&](const auto& work) { return named(plan, work); }, task.work);
  return {category, std::move(name), task.step};
}

}  // namespace annulus::ring
