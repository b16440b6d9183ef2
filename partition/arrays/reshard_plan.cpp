#include <algorithm>
#include <map>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/partition/reshard_plan.hpp>

namespace annulus {
namespace {

// The entries of one dimension that every pair of shards shares.
class DimensionOverlap {
 public:
  DimensionOverlap(const NamedSharding& from, const NamedSharding& to, int dim)
      : columns_(static_cast<std::size_t>(to.shards(dim))) {
    std::vector<PositionRanges> destinations;
    for (int b = 0; b < to.shards(dim); ++b) destinations.push_back(to.shard(b, dim));
    for (int a = 0; a < from.shards(dim); ++a) {
      const PositionRanges source = from.shard(a, dim);
      for (const PositionRanges& destination : destinations) {
        common_.push_back(intersect(source, destination));
      }
    }
  }

  [[nodiscard]] const std::vector<CommonRange>& between(int source, int destination) const {
    return common_[static_cast<std::size_t>(source) * columns_ +
                   static_cast<std::size_t>(destination)];
  }

 private:
  std::size_t columns_;
  std::vector<std::vector<CommonRange>> common_;
};

// The shard of each dimension that a rank holds; for shared kv heads, the first coordinate that has
// them.
std::vector<int> shard_of(const NamedSharding& sharding, int rank) {
  std::vector<int> shard;
  for (int dim = 0; dim < sharding.dimensions(); ++dim) {
    const int coordinate = sharding.coordinate(rank, dim);
    const int copies =
        sharding.distribution(dim).copies(sharding.global_shape()[dim], sharding.shards(dim));
    shard.push_back(coordinate / copies * copies);
  }
  return shard;
}

using Overlaps = std::vector<const std::vector<CommonRange>*>;  // per dimension

std::int64_t elements_of(const Overlaps& overlaps) {
  std::int64_t product = 1;
  for (const auto* ranges : overlaps) {
    std::int64_t sum = 0;
    for (const CommonRange& range : *ranges) sum += range.global.length;
    product *= sum;
  }
  return product;
}

// Every combination of one range per dimension.
std::vector<ReshardBox> boxes_of(const Overlaps& overlaps) {
  const auto rank = overlaps.size();
  const std::vector<std::int64_t> zeros(rank);
  const Extents empty{std::span(zeros)};
  std::vector<ReshardBox> boxes{{empty, empty, empty, empty, empty}};
  for (std::size_t dim = 0; dim < rank; ++dim) {
    std::vector<ReshardBox> longer;
    for (const ReshardBox& box : boxes) {
      for (const CommonRange& range : *overlaps[dim]) {
        ReshardBox& next = longer.emplace_back(box);
        const int d = static_cast<int>(dim);
        next.shape[d] = range.global.length;
        next.source_begin[d] = range.first.value();
        next.source_step[d] = range.first_step;
        next.destination_begin[d] = range.second.value();
        next.destination_step[d] = range.second_step;
      }
    }
    boxes = std::move(longer);
  }
  return boxes;
}

}  // namespace

std::int64_t ReshardTransfer::elements() const noexcept {
  std::int64_t sum = 0;
  for (const ReshardBox& box : boxes) sum += box.shape.product();
  return sum;
}

ReshardPlan plan_reshard(const NamedSharding& from, const NamedSharding& to,
                         std::optional<int> rank) {
  if (!(from.mesh() == to.mesh()) || !(from.global_shape() == to.global_shape())) {
    throw ArgumentError("resharding", to_string(to),
                        "the mesh and the shape of the source, " + to_string(from));
  }
  std::vector<DimensionOverlap> dimensions;
  for (int dim = 0; dim < from.dimensions(); ++dim) dimensions.emplace_back(from, to, dim);

  const int ranks = from.mesh().ranks();
  std::map<std::vector<int>, std::vector<int>> holders;  // shard → the ranks that hold it
  for (int source = 0; source < ranks; ++source) holders[shard_of(from, source)].push_back(source);

  ReshardPlan plan;
  Overlaps overlaps;
  std::vector<std::int64_t> asked_for(static_cast<std::size_t>(ranks));  // elements, per source
  for (int destination = 0; destination < ranks; ++destination) {
    const std::vector<int> wanted = shard_of(to, destination);
    for (const auto& [shard, replicas] : holders) {
      overlaps.clear();
      for (std::size_t dim = 0; dim < dimensions.size(); ++dim) {
        overlaps.push_back(&dimensions[dim].between(shard[dim], wanted[dim]));
      }
      const std::int64_t elements = elements_of(overlaps);
      if (elements == 0) continue;
      int source = destination;
      if (!std::binary_search(replicas.begin(), replicas.end(), destination)) {
        source = *std::min_element(replicas.begin(), replicas.end(), [&](int a, int b) {
          return asked_for[static_cast<std::size_t>(a)] < asked_for[static_cast<std::size_t>(b)];
        });
        asked_for[static_cast<std::size_t>(source)] += elements;
      }
      if (!rank || *rank == source || *rank == destination) {
        plan.transfers.push_back({source, destination, boxes_of(overlaps)});
      }
    }
  }
  return plan;
}

}  // namespace annulus
