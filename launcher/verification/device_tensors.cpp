#include <utility>

#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/for_tensor.hpp>

namespace annulus::verification {

template <class Each>
void DeviceTensors::for_inputs(const Each& each) {
  each("query", host_.query, query_, twins_.query);
  each("key", host_.key, key_, twins_.key);
  each("value", host_.value, value_, twins_.value);
  if (host_.bias.rank() > 0) each("bias", host_.bias, bias_, twins_.bias);
  if (host_.mask.rank() > 0) each("mask", host_.mask, mask_, twins_.mask);
}

template <class Each>
void DeviceTensors::for_results(const Each& each) {
  each("output", host_.output, output_, twins_.output);
  if (host_.lse.rank() > 0) each("LSE", host_.lse, lse_, twins_.lse);
  if (host_.maximum.rank() > 0) each("maximum", host_.maximum, maximum_, twins_.maximum);
  if (host_.sum.rank() > 0) each("sum", host_.sum, sum_, twins_.sum);
}

DeviceTensors::DeviceTensors(const ring::LocalTensors& host, Device& device, Watchdog watchdog)
    : host_(host),
      device_(device),
      stream_(device.make_stream("copies", std::move(watchdog), nullptr)),
      twins_(host) {
  if (device.place().is_host()) return;
  const auto make = [&](const char* name, const ConstTensorView& tensor, Tensor& copy, auto& twin) {
    copy =
        for_tensor(name, [&] { return Tensor(tensor.dtype(), tensor.shape(), device.memory()); });
    twin = copy.view();
  };
  for_inputs(make);
  for_results(make);
}

void DeviceTensors::upload() {
  if (device_.place().is_host()) return;
  const auto send = [&](const char* /*name*/, const ConstTensorView& tensor, const Tensor& copy,
                        const auto& /*twin*/) { device_.copy(tensor, copy.view(), *stream_); };
  for_inputs(send);
  for_results(send);
  stream_->synchronize();
}

void DeviceTensors::download() {
  if (device_.place().is_host()) return;
  for_results([&](const char* /*name*/, const TensorView& tensor, const Tensor& copy,
                  const auto& /*twin*/) { device_.copy(copy.view(), tensor, *stream_); });
  stream_->synchronize();
}

}  // namespace annulus::verification
