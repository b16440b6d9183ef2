#include <utility>

#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/for_tensor.hpp>

namespace annulus::verification {

DeviceTensors::DeviceTensors(const ring::LocalTensors& host, Device& device, Watchdog watchdog)
    : device_(device),
      stream_(device.make_stream("copies", std::move(watchdog), nullptr)),
      twins_(host) {
  if (device.place().is_host()) return;
  const auto add = [&](const char* name, const auto& tensor, auto& copies, auto& twin) {
    if (tensor.rank() == 0) return;
    copies.push_back({tensor, unfilled(name, tensor.dtype(), tensor.shape(), device.memory())});
    twin = copies.back().copy.view();
  };
  add("query", host.query, inputs_, twins_.query);
  add("key", host.key, inputs_, twins_.key);
  add("value", host.value, inputs_, twins_.value);
  add("bias", host.bias, inputs_, twins_.bias);
  add("mask", host.mask, inputs_, twins_.mask);
  add("output", host.output, results_, twins_.output);
  add("LSE", host.lse, results_, twins_.lse);
  add("maximum", host.maximum, results_, twins_.maximum);
  add("sum", host.sum, results_, twins_.sum);
}

void DeviceTensors::upload() {
  for (const auto& [host, copy] : inputs_) device_.copy(host, copy.view(), *stream_);
  for (const auto& [host, copy] : results_) device_.copy(host, copy.view(), *stream_);
  stream_->synchronize();
}

void DeviceTensors::download() {
  for (const auto& [host, copy] : results_) device_.copy(copy.view(), host, *stream_);
  stream_->synchronize();
}

}  // namespace annulus::verification
