#pragma once

#include <algorithm>
#include <cuda_runtime_api.h>
#include <vector>

#include <annulus/core/cuda_stream.hpp>

namespace annulus {

/// The order of calls on a device once some are captured into graphs of the caller, who launches
/// them without us. One event is waited for at the start of every call and recorded at its end. In
/// a graph both are external nodes, which act at every launch. Two calls at once would write the
/// same buffers, or wait on each rank for the other one.
class CallOrder {
 public:
  void add(Stream& stream) { streams_.push_back(&stream); }
  void remove(Stream& stream) noexcept { std::erase(streams_, &stream); }

  /// To be called before a capture reaches `stream`. The first time, puts it behind all calls that
  /// have been submitted.
  void begin_captures(Stream& stream) {
    if (last_) return;
    for (Stream* const other : streams_) {
      if (other != &stream) stream.wait(other->record());
    }
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    last_ = Handle<CudaEventTraits>(event);
    end(stream, false);
  }
  void begin(Stream& stream, bool captured) {
    if (!last_) return;
    check_cuda(cudaStreamWaitEvent(CudaStream::of(stream).raw(), last_.get(),
                                   captured ? cudaEventWaitExternal : cudaEventWaitDefault),
               "cudaStreamWaitEvent");
  }
  void end(Stream& stream, bool captured) {
    if (!last_) return;
    check_cuda(
        cudaEventRecordWithFlags(last_.get(), CudaStream::of(stream).raw(),
                                 captured ? cudaEventRecordExternal : cudaEventRecordDefault),
        "cudaEventRecordWithFlags");
  }

 private:
  std::vector<Stream*> streams_;
  Handle<CudaEventTraits> last_;  // the end of the last call; none before the first capture
};

}  // namespace annulus
