#include <cuda_runtime_api.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>

namespace annulus {

DeviceGuard::DeviceGuard(int device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  before_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) (void)cudaSetDevice(before_);
}

}  // namespace annulus
