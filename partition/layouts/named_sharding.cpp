#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus {

NamedSharding::NamedSharding(MeshShape mesh, PartitionSpec spec, const Extents& global_shape,
                             std::vector<Distribution> distributions)
    : mesh_(std::move(mesh)),
      spec_(std::move(spec)),
      global_shape_(global_shape),
      distributions_(std::move(distributions)) {
  const auto dims = static_cast<std::size_t>(dimensions());
  if (distributions_.size() > dims) {
    throw ArgumentError("distributions", std::to_string(distributions_.size()),
                        fmt::format("at most one per dimension of {}", to_string(global_shape)));
  }
  distributions_.resize(dims);
  for (const std::int64_t size : global_shape_) {
    if (size < 0) throw ArgumentError("shape", to_string(global_shape), "sizes of 0 or more");
  }
  for (int dim = 0; dim < dimensions(); ++dim) check_assignment(dim);
  validate(spec_, mesh_, global_shape_, distributions_);
}

void NamedSharding::check_assignment(int dim) const {
  const Assignment* const assignment = distribution(dim).assignment();
  if (assignment == nullptr) return;
  const std::int64_t size = global_shape_[dim];
  const int ranks = mesh_.size(spec_[dim]);  // may throw UnknownAxisError
  if (distribution(dim).fits(size, ranks)) return;
  throw ArgumentError(
      fmt::format("assignment of dimension {}", dim),
      fmt::format("{} positions on {} ranks", assignment->length(), assignment->ranks()),
      fmt::format("{} positions on {} ranks, as in the sharding", size, ranks));
}

PositionRanges NamedSharding::shard(int coordinate, int dim) const {
  return distribution(dim).positions(global_shape_[dim], shards(dim), coordinate);
}

std::vector<PositionRanges> NamedSharding::index(int rank) const {
  std::vector<PositionRanges> result;
  for (int dim = 0; dim < dimensions(); ++dim) result.push_back(positions(rank, dim));
  return result;
}

Extents NamedSharding::local_shape(int rank) const {
  Extents shape = global_shape_;
  for (int dim = 0; dim < dimensions(); ++dim) shape[dim] = positions(rank, dim).size();
  return shape;
}

bool NamedSharding::is_primary(int rank) const {
  for (const MeshAxis& axis : mesh_.axes()) {
    if (!spec_.names(axis.name) && mesh_.coordinate(rank, axis.name) != 0) return false;
  }
  for (int dim = 0; dim < dimensions(); ++dim) {
    const int copies = distribution(dim).copies(global_shape_[dim], shards(dim));
    if (coordinate(rank, dim) % copies != 0) return false;
  }
  return true;
}

bool same_placement(const NamedSharding& a, const NamedSharding& b) {
  if (!(a.mesh() == b.mesh()) || !(a.global_shape() == b.global_shape())) return false;
  for (int rank = 0; rank < a.mesh().ranks(); ++rank) {
    if (a.index(rank) != b.index(rank)) return false;
  }
  return true;
}

std::string to_string(const NamedSharding& sharding) {
  std::string entries;
  for (int dim = 0; dim < sharding.dimensions(); ++dim) {
    entries += (dim == 0 ? "" : ",") + to_string(sharding.spec()[dim]);
    if (!sharding.spec()[dim].empty() && sharding.distribution(dim) != Distribution::block()) {
      entries += fmt::format("({})", to_string(sharding.distribution(dim)));
    }
  }
  return fmt::format("{} on {} as {}", to_string(sharding.global_shape()),
                     to_string(sharding.mesh()), entries.empty() ? "-" : entries);
}

}  // namespace annulus
