#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/partition/named_sharding.hpp>

namespace annulus::verification {

inline constexpr std::array kNonFinite{std::numeric_limits<float>::quiet_NaN(),
                                       std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity()};

/// The larger one; NaN if either is.
[[nodiscard]] inline double worse(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// The global indices of an entry of a tensor, or of a row if the last dimensions are left out.
using Entry = std::vector<std::int64_t>;

/// The row-major number of an entry in a tensor of `shape`.
[[nodiscard]] inline std::size_t number_of(const Entry& entry, const Extents& shape) {
  std::int64_t number = 0;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    number = number * shape[dim] + entry[static_cast<std::size_t>(dim)];
  }
  return static_cast<std::size_t>(number);
}

/// Calls body(entry, its number in the part) for the entries at `index`, the positions that a rank
/// holds along each dimension, in row-major order.
template <class Body>
void for_each_entry(std::span<const PositionRanges> index, const Body& body) {
  std::vector<std::vector<std::int64_t>> positions(index.size());
  for (std::size_t dim = 0; dim < index.size(); ++dim) {
    for (std::int64_t i = 0; i < index[dim].size(); ++i) {
      positions[dim].push_back(index[dim].global(LocalPosition(i)).value());
    }
  }
  Entry entry(index.size());
  std::int64_t number = 0;
  const auto visit = [&](const auto& self, std::size_t dim) -> void {
    for (const std::int64_t position : positions[dim]) {
      entry[dim] = position;
      if (dim + 1 < positions.size()) {
        self(self, dim + 1);
      } else {
        body(static_cast<const Entry&>(entry), number++);
      }
    }
  };
  visit(visit, 0);
}

/// Numbers of any floating dtype, in float64.
inline void widen(const void* numbers, DType dtype, std::span<double> wide) {
  if (dtype == DType::float64) {
    std::copy_n(static_cast<const double*>(numbers), wide.size(), wide.data());
    return;
  }
  std::vector<float> narrow(wide.size());
  to_float32(numbers, dtype, narrow.data(), static_cast<std::int64_t>(narrow.size()));
  std::ranges::copy(narrow, wide.begin());
}

/// The numbers of a contiguous tensor in host memory.
[[nodiscard]] inline std::vector<double> numbers_of(const Tensor& tensor) {
  std::vector<double> wide(static_cast<std::size_t>(tensor.view().elements()));
  widen(tensor.view().data(), tensor.dtype(), wide);
  return wide;
}

[[nodiscard]] inline std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const auto* const data = static_cast<const std::byte*>(tensor.view().data());
  return {data, data + tensor.bytes()};
}

/// True if a rank's part of a tensor, contiguous in host memory, has the same bits as the whole
/// one.
[[nodiscard]] inline bool is_part_of(const Tensor& part, const NamedSharding& sharding, int rank,
                                     const Tensor& whole) {
  if (part.dtype() != whole.dtype() || whole.shape() != sharding.global_shape()) return false;
  const std::size_t bytes = size_of(part.dtype());
  const auto* const own = static_cast<const std::byte*>(part.view().data());
  const auto* const all = static_cast<const std::byte*>(whole.view().data());
  bool same = true;
  for_each_entry(sharding.index(rank), [&](const Entry& entry, std::int64_t i) {
    const std::byte* const expected = all + number_of(entry, whole.shape()) * bytes;
    same = same && std::memcmp(own + static_cast<std::size_t>(i) * bytes, expected, bytes) == 0;
  });
  return same;
}

}  // namespace annulus::verification
