#include <utility>

#include <annulus/core/awaiting_calls.hpp>
#include <annulus/core/call_memory.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/host_stream.hpp>

namespace annulus {

AwaitingCalls& Device::awaiting_calls() {
  if (!awaiting_calls_) awaiting_calls_ = annulus::awaiting_calls(place());
  return *awaiting_calls_;
}

CallMemory& Device::call_memory() {
  if (!call_memory_) call_memory_ = std::make_shared<CallMemory>();
  return *call_memory_;
}

CallMemory& Device::kernel_memory() {
  if (!kernel_memory_) kernel_memory_ = std::make_shared<CallMemory>();
  return *kernel_memory_;
}

void Device::begin_call(Stream& stream, ForeignStream* caller) {
  if (caller != nullptr) caller->precede(stream);
}

void Device::end_call(Stream& stream, ForeignStream* caller) {
  if (caller != nullptr) caller->follow(stream);
}

std::unique_ptr<Stream> HostDevice::make_stream(std::string name, Watchdog watchdog, Tracer* tracer,
                                                bool /*urgent*/) {
  return std::make_unique<HostStream>(std::move(name), watchdog, tracer);
}

void HostDevice::copy(const ConstTensorView& source, const TensorView& destination,
                      Stream& /*stream*/) {
  annulus::copy(source, destination);
}

}  // namespace annulus
