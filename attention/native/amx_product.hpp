#pragma once

#include <memory>

#include "native/tile_product.hpp"

namespace annulus {

/// Products by AMX: of bfloat16, summed in float32. Operands in float16 and float32 are split into
/// sums of two and three values in bfloat16, which hold them exactly, and the weights likewise; of
/// the products of parts, those below 2⁻¹⁶ (float16) or 2⁻²⁴ (float32) of the whole are left out
/// (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for
/// higher-precision computations").
[[nodiscard]] std::unique_ptr<TileProduct> make_amx_product(const TileProductSizes& sizes,
                                                            MemoryPool& memory);

}  // namespace annulus
