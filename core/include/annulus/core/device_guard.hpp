#pragma once

// Only for sources that are compiled with CUDA.

namespace annulus {

/// Makes a CUDA device current for the calling thread, and the previous one again at the end.
/// Almost free if the device is current already.
class DeviceGuard {
 public:
  /// Throws CudaError.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;  // −1: nothing to restore
};

}  // namespace annulus
