#include "schedules/building/group_nodes.hpp"

#include <algorithm>
#include <cstddef>
#include <map>

namespace annulus::ring {

GroupNodes::GroupNodes(const Prices& prices, const std::vector<int>& group) {
  std::map<int, int> numbers;
  node_of_.reserve(group.size());
  for (const int rank : group) {
    const auto [number, fresh] = numbers.try_emplace(prices.node_of(rank), count());
    if (fresh) members_.emplace_back();
    std::vector<int>& members = members_[static_cast<std::size_t>(number->second)];
    place_of_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(node_of_.size()));
    node_of_.push_back(number->second);
  }
  even_ = std::ranges::all_of(members_, [&](const std::vector<int>& members) {
    return members.size() == members_.front().size();
  });
}

int GroupNodes::turn(int from, int to) const {
  if (!even_ || node_of(from) == node_of(to)) return 0;
  const auto distance = [](int begin, int end, int of) { return (end - begin + of) % of; };
  const auto place = [&](int member) { return place_of_[static_cast<std::size_t>(member)]; };
  const int places = static_cast<int>(members_.front().size());
  return distance(node_of(from), node_of(to), count()) * places +
         distance(place(from), place(to), places);
}

bool GroupNodes::are_linked_alike(int count, const std::function<int(int)>& member) const {
  std::vector<bool> seen(members_.size());
  int nodes = 0;
  for (int i = 0; i < count; ++i) {
    const auto node = static_cast<std::size_t>(node_of(member(i)));
    if (!seen[node]) ++nodes;
    seen[node] = true;
    if (nodes != 1 && nodes != i + 1) return false;
  }
  return true;
}

}  // namespace annulus::ring
