#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/sequence_layout.hpp>

namespace annulus {

/// A spec names one mesh axis twice.
class DuplicateSpecError : public UserError {
 public:
  DuplicateSpecError(std::string_view spec, std::string axis);
  [[nodiscard]] const std::string& axis() const noexcept { return axis_; }

 private:
  std::string axis_;
};

/// A spec has more entries than the array has dimensions.
class SpecRankError : public UserError {
 public:
  SpecRankError(std::string_view spec, int entries, const Extents& shape);
};

/// The number of ranks along the axes of a dimension does not divide its size.
class IndivisibleError : public UserError {
 public:
  IndivisibleError(int dimension, std::int64_t size, AxisNames axes, int ranks);
  [[nodiscard]] int dimension() const noexcept { return dimension_; }
  [[nodiscard]] std::int64_t size() const noexcept { return size_; }
  [[nodiscard]] const AxisNames& axes() const noexcept { return axes_; }

 private:
  int dimension_;
  std::int64_t size_;
  AxisNames axes_;
};

/// The mesh axes that shard each dimension of an array. The first axis of an entry is the major
/// one. An empty entry means "none": every rank holds the whole dimension. No axis occurs twice.
class PartitionSpec {
 public:
  /// No dimension is sharded.
  PartitionSpec() = default;
  /// Throws DuplicateSpecError; ArgumentError for an empty axis name.
  explicit PartitionSpec(std::vector<AxisNames> entries);
  /// One entry per dimension, separated by commas: an axis, "a+b" for a tuple, "-" for none, as in
  /// "fsdp+dp,sp,tp,-". Spaces around names are ignored; an empty text is a spec without entries.
  /// Throws DuplicateSpecError, and ArgumentError(argument, …) if an entry or a name is empty.
  static PartitionSpec parse(std::string_view text, std::string argument = "partition spec");

  /// Number of entries as given, including trailing nones.
  [[nodiscard]] int entries() const noexcept { return static_cast<int>(entries_.size()); }
  /// The axes of one dimension; empty past the last entry.
  [[nodiscard]] const AxisNames& operator[](int dim) const noexcept;
  [[nodiscard]] bool names(std::string_view axis) const noexcept;
  /// All axes that the spec names, in order.
  [[nodiscard]] AxisNames axes() const;

  /// Missing trailing entries count as none.
  friend bool operator==(const PartitionSpec& a, const PartitionSpec& b);

 private:
  std::vector<AxisNames> entries_;
};

/// The text that PartitionSpec::parse reads: "fsdp+dp,sp,tp,-"; "-" for a spec without entries.
[[nodiscard]] std::string to_string(const PartitionSpec& spec);
/// "fsdp+dp"; "-" for none.
[[nodiscard]] std::string to_string(const AxisNames& axes);

/// Throws UnknownAxisError, SpecRankError or IndivisibleError for the first dimension that does not
/// fit. `distributions` has one entry per dimension; missing trailing entries are blocks. Sequences
/// may have shards of different sizes, and there may be fewer key/value heads than ranks.
void validate(const PartitionSpec& spec, const MeshShape& mesh, const Extents& shape,
              std::span<const Distribution> distributions = {});

/// An entry of a spec that could not be honoured.
struct SpecCorrection {
  int dimension = 0;
  AxisNames axes;  ///< the entry before the correction
  std::string reason;
  bool operator==(const SpecCorrection&) const = default;
};

struct CorrectedSpec {
  PartitionSpec spec;
  std::vector<SpecCorrection> corrections;  ///< in order of dimension; empty if nothing changed
};

/// The lenient variant of validate(): entries that it would refuse become none, and surplus entries
/// are dropped.
[[nodiscard]] CorrectedSpec corrected_spec(const PartitionSpec& spec, const MeshShape& mesh,
                                           const Extents& shape,
                                           std::span<const Distribution> distributions = {});

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
