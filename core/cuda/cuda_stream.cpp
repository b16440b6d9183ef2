#include <utility>

#include <fmt/format.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {
namespace {

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(cudaStream_t stream) {
    cudaEvent_t raw = nullptr;
    check_cuda(cudaEventCreateWithFlags(&raw, cudaEventDisableTiming), "cudaEventCreate");
    event_ = Handle<CudaEventTraits>(raw);
    check_cuda(cudaEventRecord(raw, stream), "cudaEventRecord");
  }
  [[nodiscard]] bool is_complete() const override {
    const cudaError_t state = cudaEventQuery(event_.get());
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "cudaEventQuery");
    return true;
  }
  [[nodiscard]] cudaEvent_t raw() const noexcept { return event_.get(); }

 private:
  Handle<CudaEventTraits> event_;
};

}  // namespace

CudaError::CudaError(const std::string& call, cudaError_t code)
    : LibraryError(
          fmt::format("{}: {} ({})", call, cudaGetErrorString(code), cudaGetErrorName(code))) {}

void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw CudaError(call, code);
}

void CudaStreamTraits::release(Raw raw) noexcept {
  (void)cudaStreamDestroy(raw);
}
void CudaEventTraits::release(Raw raw) noexcept {
  (void)cudaEventDestroy(raw);
}

CudaStream::CudaStream(std::string name, int device, Watchdog watchdog)
    : name_(std::move(name)), device_(device), watchdog_(watchdog) {
  cudaStream_t raw = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_.reset(raw);
}

std::shared_ptr<Event> CudaStream::record() {
  return std::make_shared<CudaEvent>(stream_.get());
}

void CudaStream::wait(std::shared_ptr<Event> event) {
  if (const auto* cuda = dynamic_cast<const CudaEvent*>(event.get())) {
    check_cuda(cudaStreamWaitEvent(stream_.get(), cuda->raw(), 0), "cudaStreamWaitEvent");
    return;
  }
  watchdog_.wait([&] { return event->is_complete(); },
                 [&] { return name_ + ": waiting for work on the host"; });
}

void CudaStream::synchronize() {
  watchdog_.wait(
      [&] {
        const cudaError_t state = cudaStreamQuery(stream_.get());
        if (state == cudaErrorNotReady) return false;
        check_cuda(state, "cudaStreamQuery");
        return true;
      },
      [&] { return fmt::format("{}: waiting for {}", name_, to_string(place())); });
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
