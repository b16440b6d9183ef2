#pragma once

#include <cuda_runtime_api.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

/// The order of calls on a device, also of calls in graphs that the caller launches without us: one
/// event is waited for at the start of every call and recorded at its end. In a graph both
/// are external nodes, which act at every launch. Two calls at once would write the same memory, or
/// wait on each rank for the other one.
///
/// External nodes order launches, not the branches of one graph, which the caller may have forked.
/// So an event of the capture orders the calls of one capture too.
class CallOrder {
 public:
  /// The device must be current.
  void begin(Stream& stream, bool captured) {
    if (captured) follow_in_capture(CudaStream::of(stream).raw());
    if (!last_) {  // the first call
      last_ = make_event();
      return;
    }
    check_cuda(cudaStreamWaitEvent(CudaStream::of(stream).raw(), last_.get(),
                                   captured ? cudaEventWaitExternal : cudaEventWaitDefault),
               "cudaStreamWaitEvent");
  }
  void end(Stream& stream, bool captured) {
    check_cuda(
        cudaEventRecordWithFlags(last_.get(), CudaStream::of(stream).raw(),
                                 captured ? cudaEventRecordExternal : cudaEventRecordDefault),
        "cudaEventRecordWithFlags");
    if (!captured) return;
    if (!last_captured_) last_captured_ = make_event();
    capture_ = capture_of(CudaStream::of(stream).raw());
    check_cuda(cudaEventRecord(last_captured_.get(), CudaStream::of(stream).raw()),
               "cudaEventRecord");
  }

 private:
  static Handle<CudaEventTraits> make_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return Handle<CudaEventTraits>(event);
  }
  static unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return id;
  }
  void follow_in_capture(cudaStream_t stream) {
    if (!last_captured_ || capture_of(stream) != capture_) return;
    check_cuda(cudaStreamWaitEvent(stream, last_captured_.get(), 0), "cudaStreamWaitEvent");
  }

  Handle<CudaEventTraits> last_;           // the end of the last call; none before the first one
  Handle<CudaEventTraits> last_captured_;  // the end of the last captured call …
  unsigned long long capture_ = 0;         // … and its capture
};

}  // namespace annulus
