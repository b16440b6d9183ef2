#include <utility>

#include <annulus/verification/device_tensors.hpp>

namespace annulus::verification {

DeviceTensors::DeviceTensors(const ring::LocalTensors& host, Device& device, Watchdog watchdog)
    : host_(host),
      device_(device),
      stream_(device.make_stream("copies", std::move(watchdog), nullptr)),
      twins_(host) {
  if (device.place().is_host()) return;
  const auto twin = [&](const ConstTensorView& tensor) {
    return Tensor(tensor.dtype(), tensor.shape(), device.memory());
  };
  query_ = twin(host.query);
  key_ = twin(host.key);
  value_ = twin(host.value);
  output_ = twin(host.output);
  lse_ = twin(host.lse);
  twins_ = {query_.view(), key_.view(), value_.view(), output_.view(), lse_.view()};
  if (host.bias.rank() > 0) {
    bias_ = twin(host.bias);
    twins_.bias = bias_.view();
  }
  if (host.mask.rank() > 0) {
    mask_ = twin(host.mask);
    twins_.mask = mask_.view();
  }
}

void DeviceTensors::upload() {
  if (device_.place().is_host()) return;
  device_.copy(host_.query, query_.view(), *stream_);
  device_.copy(host_.key, key_.view(), *stream_);
  device_.copy(host_.value, value_.view(), *stream_);
  device_.copy(host_.output, output_.view(), *stream_);
  device_.copy(host_.lse, lse_.view(), *stream_);
  if (host_.bias.rank() > 0) device_.copy(host_.bias, bias_.view(), *stream_);
  if (host_.mask.rank() > 0) device_.copy(host_.mask, mask_.view(), *stream_);
  stream_->synchronize();
}

void DeviceTensors::download() {
  if (device_.place().is_host()) return;
  device_.copy(output_.view(), host_.output, *stream_);
  device_.copy(lse_.view(), host_.lse, *stream_);
  stream_->synchronize();
}

}  // namespace annulus::verification
