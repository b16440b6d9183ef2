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

/// The ranks along the axes of a dimension do not divide its size.
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

/// Which mesh axes each dimension of an array is laid on, first axis of an entry = major; an empty
/// entry is "none" (the dimension is whole on every rank). No axis occurs twice.
class PartitionSpec {
 public:
  /// Everything whole.
  PartitionSpec() = default;
  /// Throws DuplicateSpecError; ArgumentError for an empty axis name.
  explicit PartitionSpec(std::vector<AxisNames> entries);
  /// One entry per dimension, separated by commas: an axis, "a+b" for a tuple, "-" for none, as in
  /// "fsdp+dp,sp,tp,-". Spaces around names are ignored; the empty text has no entries. Throws
  /// DuplicateSpecError, and ArgumentError(argument, …) for an entry or name that is missing.
  static PartitionSpec parse(std::string_view text, std::string argument = "partition spec");

  /// Entries as given, trailing nones included.
  [[nodiscard]] int entries() const noexcept { return static_cast<int>(entries_.size()); }
  /// The axes of one dimension; none past the last entry.
  [[nodiscard]] const AxisNames& operator[](int dim) const noexcept;
  [[nodiscard]] bool names(std::string_view axis) const noexcept;
  /// Every axis named, in order.
  [[nodiscard]] AxisNames axes() const;

  /// Missing trailing entries equal none.
  friend bool operator==(const PartitionSpec& a, const PartitionSpec& b);

 private:
  std::vector<AxisNames> entries_;
};

/// As PartitionSpec::parse reads it: "fsdp+dp,sp,tp,-"; "-" for a spec without entries.
[[nodiscard]] std::string to_string(const PartitionSpec& spec);
/// "fsdp+dp"; "-" for none.
[[nodiscard]] std::string to_string(const AxisNames& axes);

/// Throws UnknownAxisError, SpecRankError or IndivisibleError for the first dimension that is
/// wrong. `distributions` has one entry per dimension, missing trailing ones being blocks:
/// sequences may be uneven, kv heads may be fewer than ranks.
void validate(const PartitionSpec& spec, const MeshShape& mesh, const Extents& shape,
              std::span<const Distribution> distributions = {});

/// One entry of a spec that could not be honoured.
struct SpecCorrection {
  int dimension = 0;
  AxisNames axes;  ///< what the entry was
  std::string reason;
  bool operator==(const SpecCorrection&) const = default;
};

struct CorrectedSpec {
  PartitionSpec spec;
  std::vector<SpecCorrection> corrections;  ///< in order of dimension; empty if nothing changed
};

/// The lenient twin of validate(): each entry that it would refuse becomes none, surplus entries
/// go.
[[nodiscard]] CorrectedSpec corrected_spec(const PartitionSpec& spec, const MeshShape& mesh,
                                           const Extents& shape,
                                           std::span<const Distribution> distributions = {});

}  // namespace annulus
