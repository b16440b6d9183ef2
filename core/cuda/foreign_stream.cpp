#include <cuda_runtime_api.h>
#include <memory>

#include <fmt/format.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>

namespace annulus {
namespace {

class ForeignCudaStream final : public ForeignStream {
 public:
  // An event of one device cannot be recorded on a stream of another, which nothing else tells.
  ForeignCudaStream(cudaStream_t raw, int device) : raw_(raw), event_(make_event()) {
    const cudaError_t code = cudaEventRecord(event_.get(), raw_);
    if (code == cudaErrorInvalidResourceHandle) {
      (void)cudaGetLastError();
      throw ArgumentError("stream", "a stream of another device, or none",
                          fmt::format("one of {}", to_string(Place::cuda(device))));
    }
    check_cuda(code, "cudaEventRecord on the caller's stream");
  }

  [[nodiscard]] std::uint64_t id() const override {
    unsigned long long id = 0;
    check_cuda(cudaStreamGetId(raw_, &id), "cudaStreamGetId");
    return id;
  }
  [[nodiscard]] bool is_captured() const override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(raw_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  [[nodiscard]] std::weak_ptr<void> captured_graph() override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamGetCaptureInfo(raw_, &status, nullptr, &graph),
               "cudaStreamGetCaptureInfo");
    if (status != cudaStreamCaptureStatusActive) {
      throw UnsupportedError(
          "the capture of the caller's stream into a CUDA graph has become invalid: end it, and "
          "capture anew");
    }
    auto owner = std::make_unique<std::shared_ptr<void>>(std::make_shared<char>());
    std::weak_ptr<void> token = *owner;
    cudaUserObject_t object = nullptr;
    check_cuda(cudaUserObjectCreate(
                   &object, static_cast<void*>(owner.get()),
                   [](void* held) {
                     const std::unique_ptr<std::shared_ptr<void>> end(
                         static_cast<std::shared_ptr<void>*>(held));
                   },
                   1, cudaUserObjectNoDestructorSync),
               "cudaUserObjectCreate");
    (void)owner.release();  // owned by the object from now on
    check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
               "cudaGraphRetainUserObject");
    return token;
  }
  void precede(Stream& ours) override { order(raw_, CudaStream::of(ours).raw()); }
  void follow(Stream& ours) override { order(CudaStream::of(ours).raw(), raw_); }

 private:
  static Handle<CudaEventTraits> make_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return Handle<CudaEventTraits>(event);
  }

  // A wait refers to the event's state at that moment, so one event serves all calls.
  void order(cudaStream_t first, cudaStream_t second) {
    check_cuda(cudaEventRecord(event_.get(), first), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(second, event_.get(), 0), "cudaStreamWaitEvent");
  }

  cudaStream_t raw_;
  Handle<CudaEventTraits> event_;
};

}  // namespace

std::unique_ptr<ForeignStream> make_foreign_cuda_stream(void* raw, int device) {
  const DeviceGuard guard(device);
  return std::make_unique<ForeignCudaStream>(static_cast<cudaStream_t>(raw), device);
}

int current_cuda_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace annulus
