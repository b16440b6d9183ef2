#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/error.hpp>

namespace annulus {

/// Names of the mesh axes that shard a dimension, major first.
using AxisNames = std::vector<std::string>;

struct MeshAxis {
  std::string name;
  int size = 1;
  bool operator==(const MeshAxis&) const = default;
};

class MeshShape;

/// A spec, rule or option names an axis that the mesh lacks.
class UnknownAxisError : public UserError {
 public:
  UnknownAxisError(std::string_view axis, const MeshShape& mesh);
};

/// Named axes with sizes; ranks in row-major order, the last axis fastest (docs/semantics.md §3).
/// Plain data: it needs no MPI, so plans can be made for any number of ranks.
class MeshShape {
 public:
  /// One rank, no axes.
  MeshShape() = default;
  /// Throws ArgumentError("mesh", …) for a repeated name; a name that is empty or has characters
  /// other than letters, digits and underscores; a size below 1; 2³¹ or more ranks.
  explicit MeshShape(std::vector<MeshAxis> axes);
  /// Parses "dp=2,sp=-1". One size may be −1; it becomes `ranks` divided by the product of the
  /// others. `ranks` = 0: the number is unknown, and −1 is an error. Throws ArgumentError("mesh",
  /// …), also if the product differs from a known `ranks`.
  static MeshShape parse(std::string_view text, int ranks);

  [[nodiscard]] const std::vector<MeshAxis>& axes() const noexcept { return axes_; }
  /// Product of the sizes.
  [[nodiscard]] int ranks() const noexcept;
  [[nodiscard]] bool has_axis(std::string_view name) const noexcept;
  /// Throws UnknownAxisError naming the axis and the mesh's axes.
  [[nodiscard]] int axis_index(std::string_view name) const;
  [[nodiscard]] int axis_size(std::string_view name) const { return axes_[index(name)].size; }

  /// Coordinate of `rank` along one axis.
  [[nodiscard]] int coordinate(int rank, std::string_view axis) const;
  /// Coordinate of `rank` along a tuple of axes taken as one axis (row-major, first = major).
  [[nodiscard]] int coordinate(int rank, std::span<const std::string> axes) const;
  /// Number of ranks along a tuple of axes taken as one axis; 1 for no axes. Throws ArgumentError
  /// if an axis occurs twice.
  [[nodiscard]] int size(std::span<const std::string> axes) const;
  /// The mesh ranks that differ from `rank` only along `axes`, in order of their coordinate.
  [[nodiscard]] std::vector<int> group(int rank, std::span<const std::string> axes) const;

  bool operator==(const MeshShape&) const = default;

 private:
  [[nodiscard]] std::size_t index(std::string_view name) const {
    return static_cast<std::size_t>(axis_index(name));
  }
  /// The distance in ranks between two neighbours along axis `index`.
  [[nodiscard]] int rank_stride(int index) const noexcept;

  std::vector<MeshAxis> axes_;
};

/// "dp=2,sp=4"; "1 rank" without axes.
[[nodiscard]] std::string to_string(const MeshShape& shape);

}  // namespace annulus
