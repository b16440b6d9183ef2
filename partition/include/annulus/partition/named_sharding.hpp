#pragma once

#include <string>
#include <vector>

#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/distribution.hpp>
#include <annulus/partition/partition_spec.hpp>
#include <annulus/partition/position.hpp>

namespace annulus {

/// Who holds what of one array: every rank of a mesh holds, per dimension, some of its positions,
/// and all combinations of them. Along axes that the spec does not name, ranks hold the same. Plain
/// data, the same on every rank; no communication.
class NamedSharding {
 public:
  /// `distributions` has one entry per dimension of `shape`; missing trailing ones are blocks.
  /// Throws as validate() does; ArgumentError for a negative size or surplus distributions.
  NamedSharding(MeshShape mesh, PartitionSpec spec, const Extents& global_shape,
                std::vector<Distribution> distributions = {});

  [[nodiscard]] const MeshShape& mesh() const noexcept { return mesh_; }
  [[nodiscard]] const PartitionSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const Extents& global_shape() const noexcept { return global_shape_; }
  /// Dimensions of the array.
  [[nodiscard]] int dimensions() const noexcept { return global_shape_.rank(); }
  [[nodiscard]] const Distribution& distribution(int dim) const noexcept {
    return distributions_[static_cast<std::size_t>(dim)];
  }
  /// Ranks along the axes of one dimension.
  [[nodiscard]] int shards(int dim) const { return mesh_.size(spec_[dim]); }
  /// Position of a rank along the axes of one dimension, in [0, shards(dim)).
  [[nodiscard]] int coordinate(int rank, int dim) const {
    return mesh_.coordinate(rank, spec_[dim]);
  }

  /// What rank `coordinate` along the axes of a dimension holds of it.
  [[nodiscard]] PositionRanges shard(int coordinate, int dim) const;
  /// What a rank of the mesh holds of one dimension, in local order.
  [[nodiscard]] PositionRanges positions(int rank, int dim) const {
    return shard(coordinate(rank, dim), dim);
  }
  /// Likewise for all dimensions: the rank holds their product.
  [[nodiscard]] std::vector<PositionRanges> index(int rank) const;
  [[nodiscard]] Extents local_shape(int rank) const;

  /// True for exactly one rank of each set of ranks that hold the same shard: the one that writes
  /// it to a file.
  [[nodiscard]] bool is_primary(int rank) const;

 private:
  MeshShape mesh_;
  PartitionSpec spec_;
  Extents global_shape_;
  std::vector<Distribution> distributions_;
};

/// Whether every rank holds the same entries in the same order under both.
[[nodiscard]] bool same_placement(const NamedSharding& a, const NamedSharding& b);

/// "[2, 10, 4] on dp=2,sp=2 as dp,sp(zigzag),-".
[[nodiscard]] std::string to_string(const NamedSharding& sharding);

}  // namespace annulus
