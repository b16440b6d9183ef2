#include <utility>

#include <annulus/core/device.hpp>
#include <annulus/core/host_stream.hpp>

namespace annulus {

std::unique_ptr<Stream> HostDevice::make_stream(std::string name, Watchdog watchdog, Tracer* tracer,
                                                bool /*urgent*/) {
  return std::make_unique<HostStream>(std::move(name), watchdog, tracer);
}

void HostDevice::copy(const ConstTensorView& source, const TensorView& destination,
                      Stream& /*stream*/) {
  annulus::copy(source, destination);
}

}  // namespace annulus
