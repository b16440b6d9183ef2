#pragma once

#include <algorithm>
#include <cstdint>

#include <annulus/core/dtype.hpp>

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

inline void clear(const Parts& parts, std::int64_t count) {
  for (std::uint16_t* const part : parts.of) {
    if (part != nullptr) std::fill_n(part, count, std::uint16_t{0});
  }
}

}  // namespace annulus::amx
