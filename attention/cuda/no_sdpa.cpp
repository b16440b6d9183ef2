#include <annulus/attention/cuda_versions.hpp>

#include "absent_implementation.hpp"
#include "cuda_implementations.hpp"

namespace annulus {

std::unique_ptr<Implementation> make_sdpa_implementation() {
  return std::make_unique<AbsentImplementation>(
      std::vector<std::string>{"sdpa", "cudnn", "cuda_flash_attn2"},
      UnsupportedError(
          "not in this build: cuDNN attention for CUDA devices needs " ANNULUS_SDPA_NEEDS));
}

CudnnVersions cudnn_versions() {
  return {"not built", "none", "none"};
}

}  // namespace annulus
