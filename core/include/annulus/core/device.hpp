#pragma once

#include <memory>
#include <string>

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
  /// `tracer` may be null; otherwise it must outlive the stream.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                            Tracer* tracer) = 0;
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
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer) override;
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override;

 private:
  HostMemoryPool memory_;
};

}  // namespace annulus
