#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/error.hpp>

namespace annulus {

/// Mesh axis names, major first: what a dimension is laid on.
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

/// Named axes with sizes; ranks in row-major order, the last axis fastest (SEMANTICS §3). Plain
/// data: it needs no MPI, so plans can be made for any number of ranks.
class MeshShape {
 public:
  /// One rank, no axes.
  MeshShape() = default;
  /// Throws ArgumentError("mesh", …) for a repeated name, a name that is empty or has characters
  /// other than letters, digits and underscores, a size below 1, or 2³¹ ranks and more.
  explicit MeshShape(std::vector<MeshAxis> axes);
  /// Parses "dp=2,sp=-1". One size may be −1: it becomes `ranks` over the product of the others.
  /// With `ranks` = 0 (no communicator), −1 is an error. Throws ArgumentError("mesh", …) also when
  /// the product differs from `ranks` > 0.
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
  /// Position of `rank` along a tuple of axes taken as one (row-major, first = major).
  [[nodiscard]] int coordinate(int rank, std::span<const std::string> axes) const;
  /// Ranks along a tuple of axes taken as one; 1 for no axes. Throws ArgumentError for an axis
  /// named twice.
  [[nodiscard]] int size(std::span<const std::string> axes) const;
  /// The mesh ranks that differ from `rank` only along `axes`, in order of their coordinate.
  [[nodiscard]] std::vector<int> group(int rank, std::span<const std::string> axes) const;

  bool operator==(const MeshShape&) const = default;

 private:
  [[nodiscard]] std::size_t index(std::string_view name) const {
    return static_cast<std::size_t>(axis_index(name));
  }
  /// Ranks between two neighbours along axis `index`.
  [[nodiscard]] int rank_stride(int index) const noexcept;

  std::vector<MeshAxis> axes_;
};

/// "dp=2,sp=4"; "1 rank" without axes.
[[nodiscard]] std::string to_string(const MeshShape& shape);

}  // namespace annulus
