#pragma once

#include <utility>

#include <annulus/core/device.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::verification {

/// A tensor in host memory and its copy in device memory; on the CPU, just the tensor.
struct DeviceTwin {
  DeviceTwin() = default;
  /// Without a copy.
  explicit DeviceTwin(Tensor in_host_memory) : host(std::move(in_host_memory)) {}
  DeviceTwin(Tensor in_host_memory, Device& device) : DeviceTwin(std::move(in_host_memory)) {
    if (device.place().is_host()) return;
    copy = Tensor(host.dtype(), host.shape(), device.memory());
  }

  /// The view that the device computes with.
  [[nodiscard]] TensorView view() const { return has_copy() ? copy.view() : host.view(); }
  /// Both copies are ordered by the stream.
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
