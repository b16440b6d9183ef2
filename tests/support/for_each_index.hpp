#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
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

/// Calls `visit(i, j, …)` with every index below `sizes`, the last one fastest.
template <std::size_t N, class Visit>
void for_each_of(const std::array<std::int64_t, N>& sizes, const Visit& visit) {
  for_each_index(Extents(std::span<const std::int64_t>(sizes)),
                 [&](const std::vector<std::int64_t>& at) {
                   [&]<std::size_t... I>(std::index_sequence<I...> /*dims*/) {
                     visit(at[I]...);
                   }
                   (std::make_index_sequence<N>());
                 });
}

/// Calls `visit(local, global)` for every entry of a shard, the last dimension fastest. `local` is
/// the entry's index in the shard, `global` the index in the array.
template <class Visit>
void for_each_entry(const std::vector<PositionRanges>& shard, const Visit& visit) {
  std::vector<std::int64_t> sizes;
  for (const PositionRanges& positions : shard) sizes.push_back(positions.size());
  for_each_index(Extents(sizes), [&](const std::vector<std::int64_t>& local) {
    std::vector<std::int64_t> global;
    for (const PositionRanges& positions : shard) {
      global.push_back(positions.global(LocalPosition(local[global.size()])).value());
    }
    visit(local, std::as_const(global));
  });
}

/// Row-major number of an index.
inline std::int64_t linear(const Extents& shape, const std::vector<std::int64_t>& index) {
  std::int64_t result = 0;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    result = result * shape[dim] + index[static_cast<std::size_t>(dim)];
  }
  return result;
}

}  // namespace annulus::test
