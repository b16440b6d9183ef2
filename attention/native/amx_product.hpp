#pragma once

#include <memory>

#include "native/tile_product.hpp"

namespace annulus {

/// Products by AMX, which multiplies bfloat16 and sums in float32. Operands and weights in float16
/// and float32 are split exactly into sums of two and three bfloat16 values. Of the nine products
/// of float32's parts, the three below 2⁻²⁴ of the whole are left out (Henry, Tang, Heinecke 2019,
/// "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations").
[[nodiscard]] std::unique_ptr<TileProduct> make_amx_product(const TileProductSizes& sizes,
                                                            MemoryPool& memory);

}  // namespace annulus
