#include "planner/kv_groups.hpp"

#include <cstddef>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {

RankPlan KvGroups::plan(const PlanInput& input, Schedule schedule, int rank) {
  const NamedSharding& key = operands_.key;
  const auto [known, fresh] = groups_.try_emplace(key.mesh().group(rank, key.spec()[1]));
  const std::vector<int>& ranks = known->first;
  std::unique_ptr<Group>& group = known->second;
  if (fresh) {
    const auto held = [this, &ranks](int member) {
      return held_by(operands_, ranks[static_cast<std::size_t>(member)]);
    };
    group.reset(new Group{{problem_, static_cast<int>(ranks.size()), held}, {input.prices, ranks}});
  }
  group->needs.forget_some();
  const ScheduleEntry& entry = entry_of(schedule);
  if (input.backward) {
    const std::string obstacle = obstacle_of(entry, input);
    if (!obstacle.empty()) {
      throw UnsupportedError(fmt::format("schedule {}: {}", name_of(schedule), obstacle));
    }
  }
  const auto plan = input.backward ? entry.backward : entry.plan;
  return plan({input, ranks, group->needs, group->nodes, rank, key.coordinate(rank, 1)});
}

}  // namespace annulus::ring
