#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include <annulus/core/dtype.hpp>
#include <annulus/core/memory.hpp>

#include "native/amx_kernels.hpp"

// Matrices as sums of bfloat16 parts, for the sources that multiply them by AMX.
namespace annulus::amx {

/// The number of parts whose sum is exactly a value of this dtype.
[[nodiscard]] inline int parts_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return 1;
    case DType::float16:
      return 2;
    default:
      return 3;
  }
}

/// The parts of a matrix from element `index` on.
[[nodiscard]] inline Parts from(Parts parts, std::int64_t index) {
  for (std::uint16_t*& part : parts.of) part = part == nullptr ? nullptr : part + index;
  return parts;
}

/// A matrix, and the number of its elements.
template <class Matrix>
using Sized = std::pair<Matrix*, std::int64_t>;

/// Memory for matrices of `parts` parts and for float32 ones, which point into it.
[[nodiscard]] inline Buffer allocate(MemoryPool& memory, int parts,
                                     std::initializer_list<Sized<Parts>> matrices,
                                     std::initializer_list<Sized<float*>> float32) {
  std::int64_t bytes = 0;
  for (const auto& [matrix, count] : matrices) bytes += 2 * parts * count;
  for (const auto& [matrix, count] : float32) bytes += 4 * count;
  Buffer buffer = memory.allocate(static_cast<std::size_t>(bytes), "the workspace of native");
  auto* next = static_cast<std::byte*>(buffer.data());
  for (const auto& [matrix, count] : matrices) {
    for (int part = 0; part < parts; ++part, next += 2 * count) {
      matrix->of[part] = reinterpret_cast<std::uint16_t*>(next);
    }
  }
  for (const auto& [matrix, count] : float32) {
    *matrix = reinterpret_cast<float*>(next);
    next += 4 * count;
  }
  return buffer;
}

inline void clear(const Parts& parts, std::int64_t count) {
  for (std::uint16_t* const part : parts.of) {
    if (part != nullptr) std::fill_n(part, count, std::uint16_t{0});
  }
}

}  // namespace annulus::amx
