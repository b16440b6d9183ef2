#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <annulus/core/memory.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

struct AwaitingCalls;
class CallMemory;
class ForeignStream;

/// While the object lives, its device is current for the thread's own CUDA calls; at the end, the
/// previous device is current again.
class CurrentDevice {
 public:
  virtual ~CurrentDevice() = default;
};

struct TensorCopy {
  ConstTensorView source;
  TensorView destination;
};

/// The device that a rank computes with: its memory and its streams.
class Device {
 public:
  virtual ~Device() = default;
  /// Makes the device current, for callers that launch their own kernels. Null if no device has to
  /// be current.
  [[nodiscard]] virtual std::unique_ptr<CurrentDevice> make_current() const { return nullptr; }
  [[nodiscard]] virtual Place place() const noexcept = 0;
  [[nodiscard]] virtual MemoryPool& memory() noexcept = 0;
  /// The host memory that this device copies from and to fastest: page-locked memory for a GPU.
  [[nodiscard]] virtual MemoryPool& staging() = 0;
  /// `tracer` may be null; otherwise it must outlive the stream. If a device must choose, it runs
  /// the work of urgent streams first.
  [[nodiscard]] virtual std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                            Tracer* tracer, bool urgent) = 0;
  [[nodiscard]] std::unique_ptr<Stream> make_stream(std::string name, Watchdog watchdog,
                                                    Tracer* tracer) {
    return make_stream(std::move(name), std::move(watchdog), tracer, false);
  }
  /// Records what `body` submits instead of executing it: the work of `stream`, and of streams that
  /// `body` orders after it and that `stream` waits for in the end. `body` must not synchronize.
  /// Returns null, without calling `body`, if the device cannot record.
  [[nodiscard]] virtual std::unique_ptr<Recording> record(Stream& /*stream*/,
                                                          const std::function<void()>& /*body*/) {
    return nullptr;
  }
  /// Shared with other Device objects of this process on the same GPU.
  [[nodiscard]] AwaitingCalls& awaiting_calls();
  /// Memory that the calls on this device use one after the other.
  [[nodiscard]] CallMemory& call_memory();
  /// Memory that kernels use while they run (see Workspace), apart from the memory of their call.
  [[nodiscard]] CallMemory& kernel_memory();
  /// Orders a call after `caller`, the caller's stream, which may be null: work submitted to
  /// `stream` from now on starts after the present work of the caller's stream. It also starts
  /// after earlier calls. Calls on a device run one after the other, in the order in which they are
  /// submitted, or in which graphs of the caller that hold them are launched.
  virtual void begin_call(Stream& stream, ForeignStream* caller);
  /// Later work on the caller's stream starts after the call.
  virtual void end_call(Stream& stream, ForeignStream* caller);
  /// Later work on `stream` starts after earlier calls and after launched graphs that hold calls.
  virtual void await_calls(Stream& /*stream*/) {}
  /// Memory for results that the user of `stream`, a stream of the caller, may drop before the
  /// stream is done with them. Freed memory is reused only on the same stream, where later work
  /// runs after earlier work. The pool lives as long as the device.
  [[nodiscard]] virtual MemoryPool& memory_of(ForeignStream& /*stream*/) { return memory(); }
  /// Copies between tensors of equal shape and dtype, each on the host or on this device. They must
  /// be contiguous unless both are on the same side. Ordered by `stream`, which belongs to this
  /// device.
  virtual void copy(const ConstTensorView& source, const TensorView& destination,
                    Stream& stream) = 0;
  /// Several copies, in any order or at once: none may write what another reads or writes.
  virtual void copy(std::span<const TensorCopy> copies, Stream& stream) {
    for (const TensorCopy& one : copies) copy(one.source, one.destination, stream);
  }

 private:
  std::shared_ptr<AwaitingCalls> awaiting_calls_;
  std::shared_ptr<CallMemory> call_memory_, kernel_memory_;
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
  using Device::copy;
  void copy(const ConstTensorView& source, const TensorView& destination, Stream& stream) override;

 private:
  HostMemoryPool memory_;
};

}  // namespace annulus
