#include "cuda/cuda_recording.hpp"

#include <annulus/core/setup_counter.hpp>

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
  // Relaxed: a library may do on a thread of its own what a stricter mode forbids.
  auto* const captured = stream.raw();
  check_cuda(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed),
             "cudaStreamBeginCapture");
  cudaGraph_t raw = nullptr;
  try {
    body();
    (void)stream.raw();  // so that collected operations are part of the graph
  } catch (...) {
    (void)cudaStreamEndCapture(captured, &raw);
    (void)cudaGetLastError();
    const Handle<GraphTraits> half(raw);
    throw;
  }
  check_cuda(cudaStreamEndCapture(captured, &raw), "cudaStreamEndCapture");
  const Handle<GraphTraits> graph(raw);
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate");
  auto recording = std::make_unique<CudaRecording>(executable);
  // So that the first launch costs no more than the others.
  check_cuda(cudaGraphUpload(executable, captured), "cudaGraphUpload");
  return recording;
}

}  // namespace annulus
