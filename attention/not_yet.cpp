#include "absent_implementation.hpp"
#include "cuda_implementations.hpp"

namespace annulus {

std::unique_ptr<Implementation> make_flash_implementation() {
  return std::make_unique<AbsentImplementation>(
      std::vector<std::string>{"flash_attn2"},
      NotAvailableError("the flash kernel for CUDA devices"));
}

std::unique_ptr<Implementation> make_blocksparse_implementation() {
  return std::make_unique<AbsentImplementation>(
      std::vector<std::string>{"blocksparse"},
      NotAvailableError("the block-sparse kernel for CUDA devices"));
}

}  // namespace annulus
