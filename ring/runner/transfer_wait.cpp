#include "runner/transfer_wait.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "task_labels.hpp"

namespace annulus::ring {

std::vector<std::size_t> exchanges_of(const RankPlan& plan, int group) {
  std::vector<std::size_t> tasks;
  for (std::size_t i = 0; i < plan.tasks.size(); ++i) {
    const auto* exchange = std::get_if<Exchange>(&plan.tasks[i].work);
    if (exchange != nullptr && exchange->group == group) tasks.push_back(i);
  }
  return tasks;
}

std::string describe_transfers(const RankPlan& plan, int group, std::uint32_t mark,
                               bool one_sided) {
  const std::vector<std::size_t> tasks = exchanges_of(plan, group);
  const std::vector<int>& ranks = plan.groups[static_cast<std::size_t>(group)].ranks;
  const auto reached = [&](std::size_t e) {
    return mark == taking_mark(e) || mark == taken_mark(e);
  };
  std::size_t e = 0;
  while (e < tasks.size() && !reached(e)) ++e;
  if (e == tasks.size()) return {};
  const bool taking = mark == taking_mark(e);
  std::vector<std::string> waits;
  // Peers may not have taken yet what the last exchange of each contents has sent.
  std::vector<std::string> seen;
  for (std::size_t last = e + 1; last-- > 0;) {
    const Task& task = plan.tasks[tasks[last]];
    const auto& exchange = std::get<Exchange>(task.work);
    std::string contents = contents_of(plan, exchange);
    if (std::ranges::count(seen, contents) > 0) continue;
    std::vector<std::string> parts;
    if (taking) {
      for (const Transfer& receive : exchange.receives) {
        parts.push_back(fmt::format("{} bytes from rank {}", receive.bytes,
                                    ranks[static_cast<std::size_t>(receive.peer)]));
      }
    }
    if (taking != one_sided) {
      for (const Transfer& send : exchange.sends) {
        parts.push_back(fmt::format("rank {} to take {} bytes",
                                    ranks[static_cast<std::size_t>(send.peer)], send.bytes));
      }
    }
    if (!parts.empty()) {
      waits.push_back(
          fmt::format("step {}: waiting for {}: {}", task.step, contents, fmt::join(parts, ", ")));
    }
    if (taking || !one_sided) break;
    seen.push_back(std::move(contents));
  }
  return fmt::format("{}", fmt::join(waits, ", or "));
}

}  // namespace annulus::ring
