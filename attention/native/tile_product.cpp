#include "native/tile_product.hpp"

#include "native/amx_kernels.hpp"
#include "native/amx_product.hpp"
#include "native/sgemm_product.hpp"

namespace annulus {

MatrixPath best_matrix_path(DType dtype) {
  const bool half = dtype == DType::bfloat16 || dtype == DType::float16;
  return half && amx::available() ? MatrixPath::amx : MatrixPath::sgemm;
}

std::unique_ptr<TileProduct> make_tile_product(MatrixPath path, const TileProductSizes& sizes,
                                               MemoryPool& memory) {
  return path == MatrixPath::amx ? make_amx_product(sizes, memory)
                                 : make_sgemm_product(sizes, memory);
}

}  // namespace annulus
