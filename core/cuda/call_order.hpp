#pragma once

#include <cuda_runtime_api.h>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

/// Orders the calls on a device, including calls in graphs that the caller launches. One event is
/// waited for at the start of every call and recorded at its end; in a graph both are external
/// nodes, which act at every launch. Two calls at once would write the same memory, or wait for
/// each other on different ranks.
class CallOrder {
 public:
  /// The device must be current.
  void begin(Stream& stream, bool captured) {
    if (!last_) return make_event();  // the first call
    check_cuda(cudaStreamWaitEvent(CudaStream::of(stream).raw(), last_.get(),
                                   captured ? cudaEventWaitExternal : cudaEventWaitDefault),
               "cudaStreamWaitEvent");
  }
  void end(Stream& stream, bool captured) {
    check_cuda(
        cudaEventRecordWithFlags(last_.get(), CudaStream::of(stream).raw(),
                                 captured ? cudaEventRecordExternal : cudaEventRecordDefault),
        "cudaEventRecordWithFlags");
  }

 private:
  void make_event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    last_ = Handle<CudaEventTraits>(event);
  }

  Handle<CudaEventTraits> last_;  // the end of the last call; none before the first one
};

}  // namespace annulus
