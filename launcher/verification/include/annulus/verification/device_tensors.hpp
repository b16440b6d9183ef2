#pragma once

#include <memory>

#include <annulus/core/device.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/ring/local_tensors.hpp>

namespace annulus::verification {

/// Copies on a device of tensors in host memory; on the CPU, those tensors themselves.
class DeviceTensors {
 public:
  /// Makes the copies; `host` has contiguous tensors, which must outlive the object, as must
  /// `device`.
  DeviceTensors(const ring::LocalTensors& host, Device& device, Watchdog watchdog);

  [[nodiscard]] const ring::LocalTensors& tensors() const noexcept { return twins_; }
  /// Copies all of them to the device, results too, so that elements not written show.
  /// Returns when they are there.
  void upload();
  /// Copies the results back. Returns when they are there.
  void download();

 private:
  ring::LocalTensors host_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  // Calls each(name, host tensor, its copy, its view) for the inputs or the results that there are.
  template <class Each>
  void for_inputs(const Each& each);
  template <class Each>
  void for_results(const Each& each);

  Tensor query_, key_, value_, bias_, mask_;  // empty on the CPU
  Tensor output_, lse_, maximum_, sum_;       // likewise
  ring::LocalTensors twins_;
};

}  // namespace annulus::verification
