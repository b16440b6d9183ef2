#pragma once

#include <cstdint>

#include <annulus/core/dtype.hpp>

namespace annulus {

/// Widens `count` contiguous float16, bfloat16 or float32 values to float32 (exact).
void to_float32(const void* source, DType dtype, float* destination, std::int64_t count);

/// Rounds `count` contiguous float32 values to float16, bfloat16 or float32, to nearest even.
void from_float32(const float* source, DType dtype, void* destination, std::int64_t count);

}  // namespace annulus
