#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_driver.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/device_wait.hpp>
#include <annulus/core/setup_counter.hpp>

namespace annulus {
namespace {

Handle<CudaEventTraits> make_event(unsigned flags) {
  count_setup();
  cudaEvent_t raw = nullptr;
  check_cuda(cudaEventCreateWithFlags(&raw, flags), "cudaEventCreate");
  return Handle<CudaEventTraits>(raw);
}

Handle<CudaStreamTraits> make_raw_stream(int device, bool urgent) {
  const DeviceGuard guard(device);
  count_setup();
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  cudaStream_t raw = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&raw, cudaStreamNonBlocking, urgent ? greatest : least),
             "cudaStreamCreate");
  return Handle<CudaStreamTraits>(raw);
}

// Page-locked words that streams mark their progress in.
MemoryPool& marks() {
  static const std::unique_ptr<MemoryPool> pool = make_pinned_memory_pool();
  return *pool;
}

}  // namespace

// Reusable events without times.
class CudaStream::EventPool {
 public:
  [[nodiscard]] Handle<CudaEventTraits> take() {
    if (free_.empty()) return make_event(cudaEventDisableTiming);
    Handle<CudaEventTraits> event = std::move(free_.back());
    free_.pop_back();
    return event;
  }
  void give_back(Handle<CudaEventTraits> event) { free_.push_back(std::move(event)); }

 private:
  std::vector<Handle<CudaEventTraits>> free_;
};

class CudaStream::PooledEvent final : public Event {
 public:
  PooledEvent(std::shared_ptr<EventPool> pool, cudaStream_t stream)
      : pool_(std::move(pool)), event_(pool_->take()) {
    check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }
  ~PooledEvent() override { pool_->give_back(std::move(event_)); }
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;

  [[nodiscard]] bool is_complete() const override {
    const cudaError_t state = cudaEventQuery(event_.get());
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaEventQuery");
    return true;
  }
  [[nodiscard]] cudaEvent_t raw() const noexcept { return event_.get(); }
  [[nodiscard]] bool is_from(const std::shared_ptr<EventPool>& pool) const { return pool_ == pool; }

 private:
  std::shared_ptr<EventPool> pool_;
  Handle<CudaEventTraits> event_;
};

// Operations on words, in order, up to as many as one call to the driver takes.
class CudaStream::WordOperations {
 public:
  [[nodiscard]] bool is_full() const noexcept { return count_ == operations_.size(); }
  CUstreamBatchMemOpParams& add() {
    CUstreamBatchMemOpParams& operation = operations_[count_++];
    operation = {};
    return operation;
  }
  void discard() noexcept { count_ = 0; }
  /// Forgets them, even if the driver refuses them.
  void submit(cudaStream_t stream) {
    const auto count = static_cast<unsigned>(std::exchange(count_, 0));
    if (count == 0) return;
    cuda::check_driver(
        cuda::driver_calls().stream_batch_mem_op(stream, count, operations_.data(), 0),
        "cuStreamBatchMemOp (can the device wait for memory?)");
  }

 private:
  std::array<CUstreamBatchMemOpParams, 64> operations_{};  // the driver takes up to 255 at once
  std::size_t count_ = 0;
};

struct CudaStream::Span {
  TraceLabel label;
  Handle<CudaEventTraits> begin;
  Handle<CudaEventTraits> end;
};

namespace {

// "; 3.2 GiB of the device's 139.8 GiB are free" if memory is lacking.
std::string memory_text(cudaError_t code) {
  std::size_t free = 0;
  std::size_t total = 0;
  if (code != cudaErrorMemoryAllocation || cudaMemGetInfo(&free, &total) != cudaSuccess) return {};
  return fmt::format("; {} of the device's {} are free", human_bytes(free), human_bytes(total));
}

}  // namespace

CudaError::CudaError(const std::string& call, cudaError_t code)
    : LibraryError(fmt::format("{}: {} ({}){}", call, cudaGetErrorString(code),
                               cudaGetErrorName(code), memory_text(code))) {}

void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(call, code);
}

int cuda_multiprocessors(Place place) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, place.device),
             "cudaDeviceGetAttribute");
  return count;
}

void CudaStreamTraits::release(Raw raw) noexcept {
  (void)cudaStreamDestroy(raw);
}
void CudaEventTraits::release(Raw raw) noexcept {
  (void)cudaEventDestroy(raw);
}

CudaStream::CudaStream(std::string name, int device, Watchdog watchdog, Tracer* tracer, bool urgent)
    : name_(std::move(name)),
      device_(device),
      watchdog_(std::move(watchdog)),
      tracer_(tracer),
      stream_(make_raw_stream(device, urgent)),
      events_(std::make_shared<EventPool>()),
      collected_(std::make_unique<WordOperations>()),
      marked_(marks().allocate(sizeof(std::uint32_t))) {
  *static_cast<std::uint32_t*>(marked_.data()) = 0;
}

CudaStream::~CudaStream() = default;

std::shared_ptr<Event> CudaStream::record() {
  const DeviceGuard guard(device_);
  return std::make_shared<PooledEvent>(events_, raw());
}

void CudaStream::wait(std::shared_ptr<Event> event) {
  const DeviceGuard guard(device_);
  if (const auto* cuda = dynamic_cast<const PooledEvent*>(event.get())) {
    // The work of one stream is ordered anyway.
    if (!cuda->is_from(events_)) {
      check_cuda(cudaStreamWaitEvent(raw(), cuda->raw(), 0), "cudaStreamWaitEvent");
    }
    return;
  }
  watchdog_.wait([&] { return event->is_complete(); },
                 [&] { return name_ + ": waiting for work on the host"; });
}

void CudaStream::synchronize(const Waiting& waiting) {
  const DeviceGuard guard(device_);
  (void)raw();
  const auto idle = [this] {
    const cudaError_t state = cudaStreamQuery(stream_.get());
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaStreamQuery");
    return true;
  };
  wait_for_device({idle, [this] { return std::uint64_t{marked()}; },
                   fmt::format("{}: waiting for {}", name_, to_string(place()))},
                  waiting, watchdog_);
  report_spans();
}

void CudaStream::write_word(const void* word, std::uint32_t value) {
  if (collected_->is_full()) (void)raw();
  auto& operation = collected_->add().writeValue;
  operation.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.address = reinterpret_cast<CUdeviceptr>(word);
  operation.value = value;
  operation.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // with its fence
}

void CudaStream::await_word(const void* word, std::uint64_t value) {
  if (collected_->is_full()) (void)raw();
  auto& operation = collected_->add().waitValue;
  operation.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  operation.address = reinterpret_cast<CUdeviceptr>(word);
  operation.value64 = value;
  operation.flags = CU_STREAM_WAIT_VALUE_GEQ;
}

void CudaStream::flush() {
  if (!is_captured()) (void)raw();
}

void CudaStream::discard() noexcept {
  collected_->discard();
}

cudaStream_t CudaStream::raw() {
  const DeviceGuard guard(device_);
  collected_->submit(stream_.get());
  return stream_.get();
}

bool CudaStream::is_captured() const {
  cudaStreamCaptureStatus capture{};
  check_cuda(cudaStreamIsCapturing(stream_.get(), &capture), "cudaStreamIsCapturing");
  return capture != cudaStreamCaptureStatusNone;
}

void CudaStream::mark(std::uint32_t value) {
  write_word(marked_.data(), value);
}

std::uint32_t CudaStream::marked() const {
  return *static_cast<const volatile std::uint32_t*>(marked_.data());
}

void CudaStream::begin_span(TraceLabel label) {
  if (tracer_ == nullptr || !tracer_->enabled()) return;
  if (is_captured()) return;
  open_spans_.push_back({std::move(label), timed_event(), {}});
}

void CudaStream::end_span() {
  if (open_spans_.empty()) return;
  Span span = std::move(open_spans_.back());
  open_spans_.pop_back();
  try {
    span.end = timed_event();
  } catch (const CudaError&) {
    return;  // spans end in destructors; the next call reports the error
  }
  closed_spans_.push_back(std::move(span));
}

Handle<CudaEventTraits> CudaStream::timed_event() {
  const DeviceGuard guard(device_);
  Handle<CudaEventTraits> event = make_event(cudaEventDefault);
  check_cuda(cudaEventRecord(event.get(), raw()), "cudaEventRecord");
  return event;
}

// The stream is idle now: an event here ties the device's clock to the host's.
void CudaStream::report_spans() {
  if (closed_spans_.empty()) return;
  const Handle<CudaEventTraits> last = timed_event();
  check_cuda(cudaEventSynchronize(last.get()), "cudaEventSynchronize");
  const std::int64_t now = monotonic_ns();
  const auto time_of = [&](const Handle<CudaEventTraits>& event) {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, event.get(), last.get()),
               "cudaEventElapsedTime");
    return now - std::llround(static_cast<double>(milliseconds) * 1e6);
  };
  for (Span& span : closed_spans_) {
    tracer_->record({std::move(span.label), name_, time_of(span.begin), time_of(span.end)});
  }
  closed_spans_.clear();
}

CudaStream& CudaStream::of(Stream& stream) {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  if (cuda == nullptr) {
    throw InternalError("stream '" + stream.name() + "' on " + to_string(stream.place()) +
                        " used as a CUDA stream");
  }
  return *cuda;
}

}  // namespace annulus
