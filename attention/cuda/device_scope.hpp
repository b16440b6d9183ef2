#pragma once

#include <cuda_runtime_api.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

/// Makes a device current for the calling thread, and the one before again at its end.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_;
  int before_ = 0;
};

}  // namespace annulus
