#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include <annulus/mesh/peer_reach.hpp>

namespace annulus {

PeerExtent PeerReach::extent() const {
  const auto ranks = static_cast<int>(clique_of_rank.size());
  const int cliques =
      ranks == 0 ? 0 : *std::max_element(clique_of_rank.begin(), clique_of_rank.end()) + 1;
  if (cliques <= 1) return PeerExtent::all;
  return cliques == ranks ? PeerExtent::none : PeerExtent::some;
}

PeerReach PeerReach::from(std::span<const Finding> findings) {
  const auto reaches = [&](int rank, int other) {
    const std::vector<int>& reached = findings[static_cast<std::size_t>(rank)].reached;
    return std::find(reached.begin(), reached.end(), other) != reached.end();
  };
  PeerReach reach;
  std::vector<std::vector<int>> cliques;
  for (int rank = 0; rank < static_cast<int>(findings.size()); ++rank) {
    const auto home = std::find_if(cliques.begin(), cliques.end(), [&](const auto& clique) {
      return std::all_of(clique.begin(), clique.end(),
                         [&](int other) { return reaches(rank, other) && reaches(other, rank); });
    });
    reach.clique_of_rank.push_back(static_cast<int>(home - cliques.begin()));
    if (home == cliques.end()) {
      cliques.push_back({rank});
    } else {
      home->push_back(rank);
    }
  }
  for (const Finding& finding : findings) {
    if (reach.obstacle.empty()) reach.obstacle = finding.obstacle;
  }
  return reach;
}

PeerReach PeerReach::nowhere(int ranks, std::string obstacle) {
  PeerReach reach{std::vector<int>(static_cast<std::size_t>(ranks)), std::move(obstacle)};
  std::iota(reach.clique_of_rank.begin(), reach.clique_of_rank.end(), 0);
  return reach;
}

PeerExtent joint(std::span<const PeerExtent> extents) {
  const bool alike = std::all_of(extents.begin(), extents.end(),
                                 [&](PeerExtent extent) { return extent == extents.front(); });
  return alike && !extents.empty() ? extents.front() : PeerExtent::some;
}

}  // namespace annulus
