#include "planner/kv_groups.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {

KvGroups::Groups::value_type& KvGroups::group_of(const Prices& prices, int rank) {
  const NamedSharding& key = operands_.key;
  const auto [known, fresh] = groups_.try_emplace(key.mesh().group(rank, key.spec()[1]));
  const std::vector<int>& ranks = known->first;
  if (fresh) {
    const auto held = [this, &ranks](int member) {
      return held_by(operands_, ranks[static_cast<std::size_t>(member)]);
    };
    known->second.reset(
        new Group{{problem_, static_cast<int>(ranks.size()), held}, {prices, ranks}});
  }
  return *known;
}

std::vector<std::size_t> KvGroups::alike(const Prices& prices, const std::vector<int>& ranks) {
  const auto& [query, key] = std::tie(operands_.query, operands_.key);
  // Ranks that hold the same batches, rows and columns, and equally many heads. The heads begin at
  // the same place in a key/value head's group.
  std::map<std::array<std::int64_t, 7>, std::vector<std::size_t>> same;
  std::vector<std::size_t> first;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const int rank = ranks[i];
    const std::int64_t heads = query.local_shape(rank)[2];
    std::vector<std::size_t>& others =
        same[{query.coordinate(rank, 0), query.coordinate(rank, 1), key.coordinate(rank, 0),
              key.coordinate(rank, 1), heads, key.local_shape(rank)[2],
              query.coordinate(rank, 2) * heads % problem_.shape.heads_per_kv_head()}];
    const auto found = std::ranges::find_if(others, [&](std::size_t other) {
      return group_of(prices, rank).second->nodes == group_of(prices, ranks[other]).second->nodes;
    });
    first.push_back(found == others.end() ? i : *found);
    if (found == others.end()) others.push_back(i);
  }
  return first;
}

RankPlan KvGroups::plan(const PlanInput& input, Schedule schedule, int rank) {
  const auto& [ranks, group] = group_of(input.prices, rank);
  group->needs.forget_some();
  const ScheduleEntry& entry = entry_of(schedule);
  if (input.backward) {
    const std::string obstacle = obstacle_of(entry, input);
    if (!obstacle.empty()) {
      throw UnsupportedError(fmt::format("schedule {}: {}", name_of(schedule), obstacle));
    }
  }
  const auto plan = input.backward ? entry.backward : entry.plan;
  return plan({input, ranks, group->needs, group->nodes, rank, operands_.key.coordinate(rank, 1)});
}

}  // namespace annulus::ring
