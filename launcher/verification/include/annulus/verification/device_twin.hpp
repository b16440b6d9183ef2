#pragma once

#include <utility>

#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

/// A tensor in host memory and its copy where the device computes; on the CPU, the tensor itself.
struct DeviceTwin {
  DeviceTwin() = default;
  DeviceTwin(Tensor in_host_memory, Device& device) : host(std::move(in_host_memory)) {
    if (device.place().is_host()) return;
    copy = Tensor(host.dtype(), host.shape(), device.memory());
  }

  /// Where the device computes.
  [[nodiscard]] TensorView view() const { return has_copy() ? copy.view() : host.view(); }
  /// Both are done when the stream has done them.
  void upload(Device& device, Stream& stream) const {
    if (has_copy()) device.copy(host.view(), copy.view(), stream);
  }
  void download(Device& device, Stream& stream) const {
    if (has_copy()) device.copy(copy.view(), host.view(), stream);
  }

  Tensor host;
  Tensor copy;  ///< empty on the CPU

 private:
  [[nodiscard]] bool has_copy() const { return copy.shape().rank() > 0; }
};

}  // namespace annulus::verification
