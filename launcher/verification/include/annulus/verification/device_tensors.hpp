#pragma once

#include <memory>
#include <vector>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/ring/sharded_operands.hpp>

namespace annulus::verification {

/// Device copies of tensors in host memory; on the CPU, the tensors themselves.
class DeviceTensors {
 public:
  /// Makes the copies; `host` has contiguous tensors, which must outlive the object, as must
  /// `device`.
  DeviceTensors(const ring::LocalTensors& host, Device& device, Watchdog watchdog);

  [[nodiscard]] const ring::LocalTensors& tensors() const noexcept { return twins_; }
  /// Copies all tensors to the device, results too, so that unwritten elements show. Returns when
  /// the copies are done.
  void upload();
  /// Copies the results back. Returns when the copies are done.
  void download();

 private:
  template <class View>
  struct Copied {
    View host;
    Tensor copy;
  };

  Device& device_;
  std::unique_ptr<Stream> stream_;
  std::vector<Copied<ConstTensorView>> inputs_;  // empty on the CPU
  std::vector<Copied<TensorView>> results_;      // likewise
  ring::LocalTensors twins_;
};

}  // namespace annulus::verification
