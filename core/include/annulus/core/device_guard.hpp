#pragma once

// Only for sources that are compiled with CUDA.

namespace annulus {

/// Makes a CUDA device current for the calling thread, and at the end again what was current
/// before. Costs next to nothing where it is current already.
class DeviceGuard {
 public:
  /// Throws CudaError.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = -1;  // none: nothing to go back to
};

}  // namespace annulus
