#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <annulus/ring/prices.hpp>

#include "simulation/state.hpp"

namespace annulus::ring::simulation {

/// Which ranks of a mesh are simulated, and which of them stand for the others. Simulated ranks are
/// numbered as their states.
class StandIns {
 public:
  StandIns() = default;
  StandIns(std::span<const RankState> states, const Prices& prices);

  /// The number of a rank of the mesh; kAbsent if it is left out.
  [[nodiscard]] std::uint32_t present(int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    return index < index_.size() ? index_[index] : kAbsent;
  }
  /// The simulated rank whose pace a rank that is left out keeps: one at the same place of its
  /// node, if there is one, and as near as possible.
  [[nodiscard]] std::uint32_t stand_in_of(int rank) const {
    return stand_in_[static_cast<std::size_t>(rank)];
  }
  /// One more than the highest node of a simulated rank.
  [[nodiscard]] std::uint32_t nodes() const { return static_cast<std::uint32_t>(weights_.size()); }
  /// The weight of a node's messages on its network: ranks on it per simulated rank.
  [[nodiscard]] double weight(std::uint32_t node) const { return weights_[node]; }

 private:
  std::vector<std::uint32_t> index_;     // by mesh rank
  std::vector<std::uint32_t> stand_in_;  // likewise, of all ranks
  std::vector<double> weights_;          // by node
};

}  // namespace annulus::ring::simulation
