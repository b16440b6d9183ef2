#include <annulus/core/error.hpp>

#include "flash/flash.hpp"

namespace annulus {
namespace {

constexpr const char* kReason = "not in this build: the flash kernel for CUDA devices needs CUDA";

}  // namespace

Capability flash_available(Place /*place*/) {
  return Capability::no(kReason);
}

std::unique_ptr<Kernel> make_flash_kernel(const AttentionProblem& /*problem*/, Device& /*device*/) {
  throw UnsupportedError(kReason);
}

}  // namespace annulus
