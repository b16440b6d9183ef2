#pragma once

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::launcher {

/// A tensor of zeros in the device's memory, complete on return.
[[nodiscard]] inline Tensor zero_tensor(DType dtype, const Extents& shape, Device& device,
                                        Stream& stream) {
  Tensor host(dtype, shape, device.staging());
  host.fill_zero();
  if (device.place().is_host()) return host;
  Tensor tensor(dtype, shape, device.memory());
  device.copy(host.view(), tensor.view(), stream);
  stream.synchronize();
  return tensor;
}

}  // namespace annulus::launcher
