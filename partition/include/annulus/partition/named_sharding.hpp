#pragma once

#include <string>
#include <vector>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/distribution.hpp>
#include <annulus/partition/partition_spec.hpp>

namespace annulus {

/// The part of an array that each rank of a mesh holds. In each dimension a rank holds a set of
/// positions; its shard is the product of these sets. Ranks that differ only along axes that the
/// spec does not name hold the same shard. Plain data, equal on every rank; no communication.
class NamedSharding {
 public:
  /// `distributions` has one entry per dimension of `global_shape`; missing trailing entries are
  /// blocks. Throws what validate() throws, and ArgumentError for a negative size, for more
  /// distributions than dimensions, or for an assignment of another length or number of ranks.
  NamedSharding(MeshShape mesh, PartitionSpec spec, const Extents& global_shape,
                std::vector<Distribution> distributions = {});

  [[nodiscard]] const MeshShape& mesh() const noexcept { return mesh_; }
  [[nodiscard]] const PartitionSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const Extents& global_shape() const noexcept { return global_shape_; }
  /// Number of dimensions of the array.
  [[nodiscard]] int dimensions() const noexcept { return global_shape_.rank(); }
  [[nodiscard]] const Distribution& distribution(int dim) const noexcept {
    return distributions_[static_cast<std::size_t>(dim)];
  }
  /// Number of ranks along the axes of one dimension.
  [[nodiscard]] int shards(int dim) const { return mesh_.size(spec_[dim]); }
  /// A rank's coordinate along the axes of one dimension, in [0, shards(dim)).
  [[nodiscard]] int coordinate(int rank, int dim) const {
    return mesh_.coordinate(rank, spec_[dim]);
  }

  /// The positions of dimension `dim` that the rank at `coordinate` along its axes holds.
  [[nodiscard]] PositionRanges shard(int coordinate, int dim) const;
  /// The positions of dimension `dim` that a rank of the mesh holds, in local order.
  [[nodiscard]] PositionRanges positions(int rank, int dim) const {
    return shard(coordinate(rank, dim), dim);
  }
  /// The same for every dimension. The shard is their product.
  [[nodiscard]] std::vector<PositionRanges> index(int rank) const;
  [[nodiscard]] Extents local_shape(int rank) const;

  /// True for exactly one rank of each set of ranks that hold the same shard. That rank writes the
  /// shard to files.
  [[nodiscard]] bool is_primary(int rank) const;

 private:
  void check_assignment(int dim) const;

  MeshShape mesh_;
  PartitionSpec spec_;
  Extents global_shape_;
  std::vector<Distribution> distributions_;
};

/// True if both shardings give every rank the same entries in the same order.
[[nodiscard]] bool same_placement(const NamedSharding& a, const NamedSharding& b);

/// "[2, 10, 4] on dp=2,sp=2 as dp,sp(zigzag),-".
[[nodiscard]] std::string to_string(const NamedSharding& sharding);

}  // namespace annulus
