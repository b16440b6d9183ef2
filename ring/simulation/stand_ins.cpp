#include "simulation/stand_ins.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <tuple>

namespace annulus::ring::simulation {

StandIns::StandIns(std::span<const RankState> states, const Prices& prices) {
  int highest = -1;
  std::uint32_t nodes = 0;
  for (const RankState& state : states) {
    highest = std::max(highest, state.script.rank);
    nodes = std::max(nodes, state.node + 1);
  }
  index_.assign(static_cast<std::size_t>(highest + 1), kAbsent);
  std::vector<double> simulated(nodes);
  for (std::uint32_t r = 0; r < states.size(); ++r) {
    index_[static_cast<std::size_t>(states[r].script.rank)] = r;
    ++simulated[states[r].node];
  }
  weights_.assign(nodes, 1);
  for (std::uint32_t n = 0; n < nodes; ++n) {
    if (simulated[n] == 0) continue;
    weights_[n] = std::max(1.0, prices.ranks_on(static_cast<int>(n)) / simulated[n]);
  }

  std::size_t ranks = std::max(index_.size(), prices.node_of_rank.size());
  for (const RankState& state : states) {
    for (const Message& message : state.script.messages) {
      ranks = std::max(ranks, static_cast<std::size_t>(message.peer) + 1);
    }
  }
  std::map<int, int> sizes;  // by node
  std::vector<int> places;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const int node = prices.node_of(static_cast<int>(rank));
    places.push_back(prices.node_of_rank.empty() ? 0 : sizes[node]++);
  }
  stand_in_.assign(index_.begin(), index_.end());
  stand_in_.resize(ranks, kAbsent);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (stand_in_[rank] != kAbsent) continue;
    const auto distance = [&](const RankState& state) {
      const int other = state.script.rank;
      const int mine = static_cast<int>(rank);
      return std::tuple(std::abs(places[rank] - places[static_cast<std::size_t>(other)]),
                        std::abs(prices.node_of(mine) - prices.node_of(other)),
                        std::abs(mine - other));
    };
    const auto nearest = std::ranges::min_element(states, {}, distance);
    stand_in_[rank] = static_cast<std::uint32_t>(nearest - states.begin());
  }
}

}  // namespace annulus::ring::simulation
