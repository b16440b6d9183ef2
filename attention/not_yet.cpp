#include "absent_implementation.hpp"
#include "cuda_implementations.hpp"

namespace annulus {

std::unique_ptr<Implementation> make_blocksparse_implementation() {
  return std::make_unique<AbsentImplementation>(
      std::vector<std::string>{"blocksparse"},
      NotAvailableError("the block-sparse kernel for CUDA devices"));
}

}  // namespace annulus
