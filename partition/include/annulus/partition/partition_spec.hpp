#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/distribution.hpp>

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

}  // namespace annulus
