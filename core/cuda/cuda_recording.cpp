#include "cuda/cuda_recording.hpp"

#include <annulus/core/setup_counter.hpp>

#include "cuda/merge_memory_operations.hpp"

namespace annulus {
namespace {

struct GraphTraits {
  using Raw = cudaGraph_t;
  static Raw null() noexcept { return nullptr; }
  static void release(Raw raw) noexcept { (void)cudaGraphDestroy(raw); }
};
struct GraphExecTraits {
  using Raw = cudaGraphExec_t;
  static Raw null() noexcept { return nullptr; }
  static void release(Raw raw) noexcept { (void)cudaGraphExecDestroy(raw); }
};

class CudaRecording final : public Recording {
 public:
  explicit CudaRecording(cudaGraphExec_t graph) : graph_(graph) {}
  void submit(Stream& stream) override {
    check_cuda(cudaGraphLaunch(graph_.get(), CudaStream::of(stream).raw()), "cudaGraphLaunch");
  }

 private:
  Handle<GraphExecTraits> graph_;
};

}  // namespace

std::unique_ptr<Recording> record_graph(CudaStream& stream, const std::function<void()>& body) {
  count_setup();
  // Relaxed, since a library's own thread may do what a stricter mode forbids.
  check_cuda(cudaStreamBeginCapture(stream.raw(), cudaStreamCaptureModeRelaxed),
             "cudaStreamBeginCapture");
  cudaGraph_t raw = nullptr;
  try {
    body();
  } catch (...) {
    (void)cudaStreamEndCapture(stream.raw(), &raw);
    (void)cudaGetLastError();
    const Handle<GraphTraits> half(raw);
    throw;
  }
  check_cuda(cudaStreamEndCapture(stream.raw(), &raw), "cudaStreamEndCapture");
  const Handle<GraphTraits> graph(raw);
  merge_memory_operations(graph.get());
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate");
  auto recording = std::make_unique<CudaRecording>(executable);
  // Uploaded now, so that the first launch costs no more than others.
  check_cuda(cudaGraphUpload(executable, stream.raw()), "cudaGraphUpload");
  return recording;
}

}  // namespace annulus
