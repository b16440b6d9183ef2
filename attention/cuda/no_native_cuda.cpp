#include <annulus/core/error.hpp>

#include "cuda/native_cuda.hpp"

namespace annulus {

Capability native_cuda_available(Place place) {
  return Capability::no("this build has no CUDA, so nothing runs on " + to_string(place));
}

std::unique_ptr<Kernel> make_native_cuda_kernel(const AttentionProblem& /*problem*/,
                                                Device& device) {
  throw UnsupportedError("this build has no CUDA, so nothing runs on " + to_string(device.place()));
}

}  // namespace annulus
