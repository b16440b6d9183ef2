#pragma once

#include <memory>

#include "native/tile_product.hpp"

namespace annulus {

/// Products by AMX, for bfloat16 and float16. Operands in float16, and then the weights too, are
/// split into sums of two values in bfloat16, and the product of the two low parts is left out:
/// 2⁻¹⁶ of the whole.
[[nodiscard]] std::unique_ptr<TileProduct> make_amx_product(const TileProductSizes& sizes,
                                                            MemoryPool& memory);

}  // namespace annulus
