#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::test {

/// Calls `visit` with every index of `shape`, the last dimension fastest.
template <class Visit>
void for_each_index(const Extents& shape, const Visit& visit) {
  if (shape.product() == 0) return;
  std::vector<std::int64_t> index(static_cast<std::size_t>(shape.rank()), 0);
  while (true) {
    visit(index);
    int dim = shape.rank() - 1;
    while (dim >= 0 && ++index[static_cast<std::size_t>(dim)] == shape[dim]) {
      index[static_cast<std::size_t>(dim--)] = 0;
    }
    if (dim < 0) return;
  }
}

/// Calls `visit` with the global positions of every entry of a shard, the last dimension fastest.
template <class Visit>
void for_each_position(const std::vector<PositionRanges>& shard, const Visit& visit) {
  std::vector<std::int64_t> sizes;
  for (const PositionRanges& positions : shard) sizes.push_back(positions.size());
  for_each_index(Extents(sizes), [&](std::vector<std::int64_t> at) {
    for (std::size_t dim = 0; dim < at.size(); ++dim) {
      at[dim] = shard[dim].global(LocalPosition(at[dim])).value();
    }
    visit(at);
  });
}

}  // namespace annulus::test
