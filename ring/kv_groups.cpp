#include "kv_groups.hpp"

#include <cstddef>

#include "schedules/schedules.hpp"

namespace annulus::ring {

RankPlan KvGroups::plan(const PlanInput& input, Schedule schedule, int rank) {
  const NamedSharding& key = operands_.key;
  const auto [group, fresh] = needs_.try_emplace(key.mesh().group(rank, key.spec()[1]));
  const std::vector<int>& ranks = group->first;
  if (fresh) {
    group->second = std::make_unique<KvNeeds>(
        problem_, static_cast<int>(ranks.size()), [this, &ranks](int member) {
          return held_by(operands_, ranks[static_cast<std::size_t>(member)]);
        });
  }
  return entry_of(schedule).plan({input, ranks, *group->second, rank, key.coordinate(rank, 1)});
}

}  // namespace annulus::ring
