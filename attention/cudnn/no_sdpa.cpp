#include <annulus/attention/cuda_versions.hpp>
#include <annulus/core/error.hpp>

#include "cudnn/sdpa.hpp"

namespace annulus {
namespace {

constexpr const char* kReason =
    "not in this build: cuDNN attention for CUDA devices needs " ANNULUS_SDPA_NEEDS;

}  // namespace

Capability sdpa_available(Place /*place*/) {
  return Capability::no(kReason);
}

std::unique_ptr<Kernel> make_sdpa_kernel(const AttentionProblem& /*problem*/, Device& /*device*/) {
  throw UnsupportedError(kReason);
}

CudnnVersions cudnn_versions() {
  return {"not built", "none", "none"};
}

}  // namespace annulus
