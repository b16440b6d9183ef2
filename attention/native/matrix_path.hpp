#pragma once

#include <cstdint>

#include <annulus/core/dtype.hpp>

namespace annulus {

/// How the native kernel multiplies matrices.
enum class MatrixPath : std::uint8_t {
  sgemm,  ///< OpenBLAS in float32; half types are widened
  amx     ///< Intel's tile registers: bfloat16 products, float32 sums; wider types are split
};

/// The fastest path of this CPU for a dtype. The first call asks Linux to permit tile registers.
[[nodiscard]] MatrixPath best_matrix_path(DType dtype);

}  // namespace annulus
