#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <annulus/core/convert.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

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

}  // namespace annulus::verification
