#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

/// What a rank computes with: its memory and its streams.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual Place place() const noexcept = 0;
  [[nodiscard]] virtual MemoryPool& memory() noexcept = 0;
  /// Host memory that is copied from and to here fastest: page-locked, for a GPU.
  [[nodiscard]] virtual MemoryPool& staging() = 0;
  /// `tracer` may be null; otherwise it must outlive the stream. What waits on an urgent stream
  /// goes first where the device must choose.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                            Tracer* tracer, bool urgent) = 0;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer) {
    return make_stream(std::move(name), std::move(watchdog), tracer, false);
  }
  /// Records what `body` submits to `stream`, and to streams that it orders behind it and whose
  /// work `stream` waits for in the end, instead of doing it. `body` must not synchronize. Null,
  /// without calling `body`, where work cannot be recorded.
  [[nodiscard]] virtual std::unique_ptr<Recording> record(Stream& /*stream*/,
                                                          const std::function<void()>& /*body*/) {
    return nullptr;
  }
  /// Copies between contiguous tensors of equal shape and dtype, each on the host or here. Ordered
  /// by `stream`, one of this device.
  virtual void copy(const ConstTensorView& source, const TensorView& destination,
                    Stream& stream) = 0;
};

/// The CPU cores that the rank may use.
class HostDevice final : public Device {
 public:
  [[nodiscard]] Place place() const noexcept override { return Place::host(); }
  [[nodiscard]] MemoryPool& memory() noexcept override { return memory_; }
  [[nodiscard]] MemoryPool& staging() override { return memory_; }
  using Device::make_stream;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer, bool urgent) override;
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override;

 private:
  HostMemoryPool memory_;
};

}  // namespace annulus
