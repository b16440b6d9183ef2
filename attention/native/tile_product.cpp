#include "native/tile_product.hpp"

#include "native/amx_kernels.hpp"
#include "native/amx_product.hpp"
#include "native/sgemm_product.hpp"

namespace annulus {

MatrixPath best_matrix_path(DType dtype) {
  switch (dtype) {
    case DType::float16:
    case DType::bfloat16:
    case DType::float32:
      return amx::available() ? MatrixPath::amx : MatrixPath::sgemm;
    default:
      return MatrixPath::sgemm;
  }
}

std::unique_ptr<TileProduct> make_tile_product(MatrixPath path, const TileProductSizes& sizes,
                                               MemoryPool& memory) {
  return path == MatrixPath::amx ? make_amx_product(sizes, memory)
                                 : make_sgemm_product(sizes, memory);
}

}  // namespace annulus
