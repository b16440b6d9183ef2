#pragma once

#include <memory>
#include <string>
#include <utility>

#include <annulus/core/device.hpp>

namespace annulus::test {

/// The host under another place, such as that of a GPU.
class PretendedDevice : public Device {
 public:
  explicit PretendedDevice(Place place) : place_(place) {}
  [[nodiscard]] Place place() const noexcept override { return place_; }
  [[nodiscard]] MemoryPool& memory() noexcept override { return host_.memory(); }
  [[nodiscard]] MemoryPool& staging() override { return host_.staging(); }
  using Device::make_stream;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer, bool urgent) override {
    return host_.make_stream(std::move(name), std::move(watchdog), tracer, urgent);
  }
  using Device::copy;
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override {
    host_.copy(source, destination, stream);
  }

 private:
  Place place_;
  HostDevice host_;
};

}  // namespace annulus::test
