#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <annulus/ring/prices.hpp>

#include "simulation/state.hpp"

namespace annulus::ring::simulation {

/// The simulated ranks of a mesh, and for each other rank the simulated rank that stands for it.
/// A simulated rank's number is the index of its state.
class StandIns {
 public:
  StandIns() = default;
  StandIns(std::span<const RankState> states, const Prices& prices);

  /// The number of a rank of the mesh; kAbsent if the rank is not simulated.
  [[nodiscard]] std::uint32_t present(int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return index < index_.size() ? index_[index] : kAbsent;
  }
  /// The simulated rank that stands for `rank`, which is assumed to progress at the same pace. It
  /// has the most similar place in its node; of several, it is the nearest one.
  [[nodiscard]] std::uint32_t stand_in_of(int rank) const {
    return stand_in_[static_cast<std::size_t>(rank)];
  }
  /// One more than the highest node of a simulated rank.
  [[nodiscard]] std::uint32_t nodes() const { return static_cast<std::uint32_t>(weights_.size()); }
  /// The weight of a node's messages on its network: ranks of the node per simulated rank.
  [[nodiscard]] double weight(std::uint32_t node) const { return weights_[node]; }

 private:
  std::vector<std::uint32_t> index_;     // by mesh rank
  std::vector<std::uint32_t> stand_in_;  // likewise, of all ranks
  std::vector<double> weights_;          // by node
};

}  // namespace annulus::ring::simulation
