#pragma once

#include <memory>

#include "native/tile_product.hpp"

namespace annulus {

/// Products by OpenBLAS in float32. Half types are widened tile by tile.
[[nodiscard]] std::unique_ptr<TileProduct> make_sgemm_product(const TileProductSizes& sizes,
                                                              MemoryPool& memory);

}  // namespace annulus
