#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/mesh/mesh_shape.hpp>

namespace annulus {
namespace {

constexpr int kInferred = -1;

std::string list_of_names(const MeshShape& mesh) {
  if (mesh.axes().empty()) return "none";
  std::string names;
  for (const MeshAxis& axis : mesh.axes()) names += (names.empty() ? "" : ", ") + axis.name;
  return names;
}

// A name must not contain the punctuation of specs and options.
bool is_valid_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_';
  });
}

// The product of the sizes; nothing if it does not fit an int.
std::optional<int> product_of(const std::vector<MeshAxis>& axes) {
  std::int64_t product = 1;
  for (const MeshAxis& axis : axes) {
    product *= axis.size;
    if (product > std::numeric_limits<int>::max()) return std::nullopt;
  }
  return static_cast<int>(product);
}

std::string quoted(std::string_view text) {
  return fmt::format("'{}'", text);
}

MeshAxis parse_axis(std::string_view entry, std::string_view whole) {
  const std::size_t equals = entry.find('=');
  if (equals == std::string_view::npos) {
    throw ArgumentError("mesh", quoted(whole), "axes as name=size, separated by commas");
  }
  const std::string_view digits = entry.substr(equals + 1);
  MeshAxis axis{std::string(entry.substr(0, equals)), 0};
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), axis.size);
  if (code != std::errc() || end != digits.data() + digits.size()) {
    throw ArgumentError("mesh", quoted(whole),
                        fmt::format("a whole number as size of axis '{}'", axis.name));
  }
  return axis;
}

}  // namespace

UnknownAxisError::UnknownAxisError(std::string_view axis, const MeshShape& mesh)
    : UserError(fmt::format("unknown mesh axis '{}': the mesh's axes are {}", axis,
                            list_of_names(mesh))) {}

MeshShape::MeshShape(std::vector<MeshAxis> axes) : axes_(std::move(axes)) {
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    const MeshAxis& axis = axes_[i];
    if (!is_valid_name(axis.name)) {
      throw ArgumentError("mesh", "axis name " + quoted(axis.name),
                          "a name of letters, digits and underscores");
    }
    if (std::any_of(axes_.begin(), axes_.begin() + static_cast<std::ptrdiff_t>(i),
                    [&](const MeshAxis& earlier) { return earlier.name == axis.name; })) {
      throw ArgumentError("mesh", fmt::format("axis '{}' twice", axis.name), "each axis once");
    }
    if (axis.size < 1) {
      throw ArgumentError("mesh", fmt::format("{}={}", axis.name, axis.size),
                          "a size of 1 or more");
    }
  }
  if (!product_of(axes_)) {
    throw ArgumentError("mesh", to_string(*this), "a product of sizes below 2^31");
  }
}

MeshShape MeshShape::parse(std::string_view text, int ranks) {
  std::vector<MeshAxis> axes;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    axes.push_back(parse_axis(text.substr(begin, end - begin), text));
    begin = end + 1;
  }
  const auto is_inferred = [](const MeshAxis& axis) { return axis.size == kInferred; };
  const auto inferred = std::find_if(axes.begin(), axes.end(), is_inferred);
  if (inferred != axes.end()) {
    if (std::count_if(axes.begin(), axes.end(), is_inferred) > 1) {
      throw ArgumentError("mesh", quoted(text), "at most one size of -1");
    }
    if (ranks == 0) {
      throw ArgumentError("mesh", quoted(text),
                          "no size of -1, as the number of ranks is not known");
    }
    inferred->size = 1;
    const int others = MeshShape(axes).ranks();
    if (ranks % others != 0) {
      throw ArgumentError("mesh", quoted(text),
                          fmt::format("sizes whose product ({}) divides {} ranks", others, ranks));
    }
    inferred->size = ranks / others;
  }
  MeshShape shape(std::move(axes));
  if (ranks > 0 && shape.ranks() != ranks) {
    throw ArgumentError("mesh", fmt::format("'{}', {} ranks", text, shape.ranks()),
                        fmt::format("sizes whose product is {}, the number of ranks", ranks));
  }
  return shape;
}

int MeshShape::ranks() const noexcept {
  return product_of(axes_).value_or(0);
}

bool MeshShape::has_axis(std::string_view name) const noexcept {
  return std::any_of(axes_.begin(), axes_.end(),
                     [&](const MeshAxis& axis) { return axis.name == name; });
}

int MeshShape::axis_index(std::string_view name) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(),
                                  [&](const MeshAxis& axis) { return axis.name == name; });
  if (found == axes_.end()) throw UnknownAxisError(name, *this);
  return static_cast<int>(found - axes_.begin());
}

int MeshShape::rank_stride(int index) const noexcept {
  int stride = 1;
  for (auto i = static_cast<std::size_t>(index) + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  return stride;
}

int MeshShape::coordinate(int rank, std::string_view axis) const {
  return rank / rank_stride(axis_index(axis)) % axis_size(axis);
}

int MeshShape::coordinate(int rank, std::span<const std::string> axes) const {
  int result = 0;
  for (const std::string& axis : axes) result = result * axis_size(axis) + coordinate(rank, axis);
  return result;
}

int MeshShape::size(std::span<const std::string> axes) const {
  int product = 1;
  for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
    if (std::find(axes.begin(), axis, *axis) != axis) {
      throw ArgumentError("mesh axes", fmt::format("{}", fmt::join(axes, "+")), "each axis once");
    }
    product *= axis_size(*axis);
  }
  return product;
}

std::vector<int> MeshShape::group(int rank, std::span<const std::string> axes) const {
  std::vector<int> members{rank};
  const int count = size(axes);
  // The member with coordinate 0 along every axis, then the axes from the fastest to the slowest.
  for (const std::string& axis : axes) {
    members.front() -= coordinate(rank, axis) * rank_stride(axis_index(axis));
  }
  members.reserve(static_cast<std::size_t>(count));
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    const std::size_t block = members.size();
    const int stride = rank_stride(axis_index(*axis));
    for (int i = 1; i < axis_size(*axis); ++i) {
      for (std::size_t k = 0; k < block; ++k) members.push_back(members[k] + i * stride);
    }
  }
  return members;
}

std::string to_string(const MeshShape& shape) {
  if (shape.axes().empty()) return "1 rank";
  std::string text;
  for (const MeshAxis& axis : shape.axes()) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  }
  return text;
}

}  // namespace annulus
