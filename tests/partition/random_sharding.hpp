#pragma once

#include <random>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

#include "tests/support/for_each_index.hpp"

namespace annulus::test {

using Random = std::mt19937;

inline int draw(Random& random, int low, int high) {
  // Not std::uniform_int_distribution, whose numbers differ between libraries.
  return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
}

/// `ranks` on one to three axes.
inline MeshShape random_mesh(Random& random, int ranks) {
  std::vector<MeshAxis> axes;
  const int count = draw(random, 1, 3);
  for (int i = 0; i < count; ++i) {
    int size = ranks;
    if (i + 1 < count) {
      do size = draw(random, 1, ranks);
      while (ranks % size != 0);
    }
    axes.push_back({std::string(1, static_cast<char>('x' + i)), size});
    ranks /= size;
  }
  return MeshShape(axes);
}

/// How to lay dimensions out, before their sizes are known.
struct RandomPlacement {
  std::vector<AxisNames> entries;
  std::vector<Distribution> distributions;
};

inline Distribution random_distribution(Random& random) {
  switch (draw(random, 0, 3)) {
    case 0:
      return Distribution::block();
    case 1:
      return Distribution::kv_heads();
    default: {
      const auto kind = static_cast<LayoutKind>(draw(random, 0, 2));
      const std::int64_t granule = draw(random, 1, 3);
      return Distribution::sequence(kind, kind == LayoutKind::striped ? 1 : granule);
    }
  }
}

inline RandomPlacement random_placement(Random& random, const MeshShape& mesh, int dims) {
  RandomPlacement result;
  result.entries.resize(static_cast<std::size_t>(dims));
  std::vector<MeshAxis> axes = mesh.axes();
  for (std::size_t i = axes.size(); i > 1; --i) {
    std::swap(axes[i - 1],
              axes[static_cast<std::size_t>(draw(random, 0, static_cast<int>(i) - 1))]);
  }
  for (const MeshAxis& axis : axes) {
    const int dim = draw(random, -1, dims - 1);  // −1: replicated along this axis
    if (dim >= 0) result.entries[static_cast<std::size_t>(dim)].push_back(axis.name);
  }
  for (int dim = 0; dim < dims; ++dim) result.distributions.push_back(random_distribution(random));
  return result;
}

/// Gives each position to a random rank.
inline Assignment random_assignment(Random& random, std::int64_t length, int ranks) {
  std::vector<std::vector<PositionRange>> held(static_cast<std::size_t>(ranks));
  for (std::int64_t p = 0; p < length; ++p) {
    held[static_cast<std::size_t>(draw(random, 0, ranks - 1))].push_back({GlobalPosition(p), 1, 1});
  }
  std::vector<PositionRanges> by_rank;
  for (auto& ranges : held) by_rank.emplace_back(std::move(ranges));
  return Assignment(std::move(by_rank));
}

/// Two random shardings of one random shape on one mesh.
inline std::pair<NamedSharding, NamedSharding> random_shardings(Random& random,
                                                                const MeshShape& mesh) {
  const int dims = draw(random, 1, 4);
  for (;;) {
    RandomPlacement from = random_placement(random, mesh, dims);
    RandomPlacement to = random_placement(random, mesh, dims);
    std::vector<std::int64_t> sizes;
    bool fits = true;
    for (int dim = 0; dim < dims && fits; ++dim) {
      const auto d = static_cast<std::size_t>(dim);
      std::vector<std::int64_t> candidates;
      for (std::int64_t size = 0; size <= 17; ++size) {
        if (from.distributions[d].fits(size, mesh.size(from.entries[d])) &&
            to.distributions[d].fits(size, mesh.size(to.entries[d]))) {
          candidates.push_back(size);
        }
      }
      // An empty array shows little: draw it rarely.
      if (candidates.size() > 1 && draw(random, 0, 19) != 0) candidates.erase(candidates.begin());
      fits = !candidates.empty();
      if (fits) {
        const int last = static_cast<int>(candidates.size()) - 1;
        sizes.push_back(candidates[static_cast<std::size_t>(draw(random, 0, last))]);
      }
    }
    if (!fits) continue;
    for (RandomPlacement* placement : {&from, &to}) {
      for (std::size_t d = 0; d < sizes.size(); ++d) {
        Distribution& distribution = placement->distributions[d];
        if (distribution.kind() != Distribution::Kind::sequence || draw(random, 0, 3) != 0)
          continue;
        distribution = Distribution::assigned(
            random_assignment(random, sizes[d], mesh.size(placement->entries[d])));
      }
    }
    const Extents shape{std::span<const std::int64_t>(sizes)};
    return {NamedSharding(mesh, PartitionSpec(from.entries), shape, from.distributions),
            NamedSharding(mesh, PartitionSpec(to.entries), shape, to.distributions)};
  }
}

/// The element at a local index, relative to the first one.
inline std::int64_t offset_of(const ConstTensorView& shard,
                              const std::vector<std::int64_t>& index) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < shard.rank(); ++dim) {
    offset += index[static_cast<std::size_t>(dim)] * shard.stride(dim);
  }
  return offset;
}

/// Sets each element of a shard of int32 in host memory to its row-major number in the array.
inline void number_elements(const NamedSharding& sharding, int rank, const TensorView& shard) {
  for_each_entry(sharding.index(rank), [&](const auto& local, const auto& global) {
    shard.as<std::int32_t>()[offset_of(shard, local)] =
        static_cast<std::int32_t>(linear(sharding.global_shape(), global));
  });
}

/// How many elements of such a shard are not their number.
inline int wrong_numbers(const NamedSharding& sharding, int rank, const ConstTensorView& shard) {
  int wrong = 0;
  for_each_entry(sharding.index(rank), [&](const auto& local, const auto& global) {
    const std::int64_t number = linear(sharding.global_shape(), global);
    wrong += shard.as<std::int32_t>()[offset_of(shard, local)] != number ? 1 : 0;
  });
  return wrong;
}

}  // namespace annulus::test
