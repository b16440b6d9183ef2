#include <annulus/core/error.hpp>

#include "runner/cuda/cuda_operations.hpp"

namespace annulus::ring {

std::unique_ptr<LocalOperations> make_cuda_operations() {
  throw UnsupportedError("this build has no CUDA");
}

}  // namespace annulus::ring
