#pragma once

// Only for sources that are compiled with CUDA.

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <string>
#include <vector>

#include <annulus/core/error.hpp>
#include <annulus/core/handle.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/place.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/core/watchdog.hpp>

namespace annulus {

/// A CUDA call returned an error; the message has the call and CUDA's own text.
class CudaError : public LibraryError {
 public:
  CudaError(const std::string& call, cudaError_t code);
};

/// Throws CudaError unless `code` is cudaSuccess.
void check_cuda(cudaError_t code, const char* call);

/// The number of multiprocessors of a GPU.
[[nodiscard]] int cuda_multiprocessors(Place place);

struct CudaStreamTraits {
  using Raw = cudaStream_t;
  static Raw null() noexcept { return nullptr; }
  static void release(Raw raw) noexcept;
};
struct CudaEventTraits {
  using Raw = cudaEvent_t;
  static Raw null() noexcept { return nullptr; }
  static void release(Raw raw) noexcept;
};

/// A stream of a CUDA device. Its calls may come from any thread, under any current device.
class CudaStream final : public Stream {
 public:
  /// `tracer` may be null; otherwise it must outlive the stream.
  CudaStream(std::string name, int device, Watchdog watchdog, Tracer* tracer, bool urgent);
  ~CudaStream() override;

  [[nodiscard]] const std::string& name() const noexcept override { return name_; }
  [[nodiscard]] Place place() const noexcept override { return Place::cuda(device_); }
  [[nodiscard]] std::shared_ptr<Event> record() override;
  /// A CUDA event makes the stream wait; any other makes the calling thread wait.
  void wait(std::shared_ptr<Event> event) override;
  using Stream::synchronize;
  /// See wait_for_device(). Spans reach the tracer here.
  void synchronize(const Waiting& waiting) override;
  /// The device advances by itself.
  void progress() override {}
  void mark(std::uint32_t value) override;
  [[nodiscard]] std::uint32_t marked() const override;
  /// Measured by the device. Work that is being recorded has no spans.
  void begin_span(TraceLabel label) override;
  void end_span() override;

  /// Writes a word of memory that the device can reach, once everything before it is visible to all
  /// devices. Such operations are collected, since a call to the driver costs as much for one of
  /// them as for many: they reach the device before the next work of another kind.
  void write_word(const void* word, std::uint32_t value);
  /// Later work waits until these 64 bits are at least `value`. Waits are collected like writes.
  void await_word(const void* word, std::uint64_t value);
  /// Keeps work that is being captured, since nothing runs before the capture has ended.
  void flush() override;
  void discard() noexcept override;
  [[nodiscard]] bool is_captured() const override;

  /// The CUDA stream, for work of other kinds that is submitted at once. Hands over the collected
  /// operations first. After a later operation on a word, call raw() again.
  [[nodiscard]] cudaStream_t raw();
  /// The CUDA stream behind `stream`; throws InternalError for another kind.
  static CudaStream& of(Stream& stream);

 private:
  class EventPool;
  class PooledEvent;
  class WordOperations;
  struct Span;

  [[nodiscard]] Handle<CudaEventTraits> timed_event();
  void report_spans();

  std::string name_;
  int device_;
  Watchdog watchdog_;
  Tracer* tracer_;
  Handle<CudaStreamTraits> stream_;
  std::shared_ptr<EventPool> events_;  // shared with events, which may outlive the stream
  std::unique_ptr<WordOperations> collected_;
  Buffer marked_;  // one word of host memory that the device writes
  std::vector<Span> open_spans_;
  std::vector<Span> closed_spans_;
};

}  // namespace annulus
