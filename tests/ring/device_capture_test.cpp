// Calls of the public interface that the caller captures into CUDA graphs.
#include <cuda_runtime_api.h>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/cuda.hpp>

#include "tests/ring/device_face_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;

using DeviceCapture = DeviceFace;

// Into a graph of the caller, whatever the object has recorded itself by then.
TEST_F(DeviceCapture, ACallCanBeCaptured) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  for (const int calls_before : {1, 2, 3}) {
    SCOPED_TRACE(calls_before);
    Layer layer(*context_, options, 3);
    layer.upload(stream_);
    for (int i = 0; i < calls_before; ++i) layer.run(stream_);
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "begin of capture");
    layer.run(stream_);
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &graph), "end of capture");
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int round = 0; round < 3; ++round) {
      layer.spoil(stream_);
      check_cuda(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch");
      layer.expect_right(stream_, options.mask);
      layer.spoil(stream_);
      layer.run(stream_);  // beside the graph
      layer.expect_right(stream_, options.mask);
    }
    check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
}

// A call of a layer, captured by the caller.
class CapturedCall {
 public:
  CapturedCall(Layer& layer, cudaStream_t stream) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin of capture");
    layer.run(stream);
    check_cuda(cudaStreamEndCapture(stream, &graph_), "end of capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~CapturedCall() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
  }
  CapturedCall(const CapturedCall&) = delete;
  CapturedCall& operator=(const CapturedCall&) = delete;
  void launch(cudaStream_t stream) {
    check_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Other strides and another mask take other kernels, memory and exchanges.
TEST_F(DeviceCapture, AGraphComputesWhatWasCapturedWhateverComesLater) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  Layer layer(*context_, options, 3);
  layer.upload(stream_);
  layer.run(stream_);
  auto graph = std::make_unique<CapturedCall>(layer, stream_);
  const auto expect_captured = [&] {
    for (int launch = 0; launch < 2; ++launch) {
      layer.spoil(stream_);
      graph->launch(stream_);
      layer.expect_right(stream_, options.mask);
    }
  };
  expect_captured();
  for (int call = 0; call < 2; ++call) layer.run_with_zero_queries_head_major(stream_);
  expect_captured();
  Mask window = options.mask;
  window.set_window(200, 0);
  layer.attention.set_mask(window);
  for (int call = 0; call < 3; ++call) {
    layer.spoil(stream_);
    layer.run(stream_);
    layer.expect_right(stream_, window);
    expect_captured();
  }
  // Memory for another set of buffers, which must not be that of the graph.
  Layer next(*context_, options, 7);
  next.upload(stream_);
  next.run(stream_);
  next.expect_right(stream_, options.mask);
  expect_captured();
  graph.reset();
  layer.attention.set_mask(options.mask);
  layer.spoil(stream_);
  layer.run(stream_);
  layer.expect_right(stream_, options.mask);
}

TEST_F(DeviceCapture, GraphsAndOtherCallsTakeTurnsWhateverTheirStreams) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  cudaStream_t other = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  first.upload(stream_);
  second.upload(other);
  first.run(stream_);
  second.run(other);
  CapturedCall graph(first, stream_);
  for (int round = 0; round < 20; ++round) {
    first.spoil(stream_);
    second.spoil(other);
    // One of the streams is late, on each rank in turn.
    const cudaStream_t late = round % 2 == test::session().rank() % 2 ? stream_ : other;
    check_cuda(cudaLaunchHostFunc(late, sleep_a_while, nullptr), "cudaLaunchHostFunc");
    for (int call = 0; call < 3; ++call) {
      graph.launch(stream_);
      second.run(other);
    }
    first.expect_right(stream_, options.mask);
    second.expect_right(other, options.mask);
  }
  second.attention.wait();
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

TEST_F(DeviceCapture, WaitingIncludesLaunchedGraphs) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  const auto layer = std::make_unique<Layer>(*context_, options, 3);
  layer->upload(stream_);
  layer->run(stream_);
  CapturedCall graph(*layer, stream_);
  layer->attention.wait();
  check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
  graph.launch(stream_);
  const auto begin = Clock::now();
  layer->attention.wait();
  EXPECT_GE(milliseconds_since(begin), 50);
  layer->expect_right(stream_, options.mask);
}

TEST_F(DeviceCapture, AFirstCallCannotBeCaptured) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  Layer layer(*context_, options, 3);
  layer.upload(stream_);
  check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "begin of capture");
  EXPECT_THAT(test::message_of<UnsupportedError>([&] { layer.run(stream_); }),
              HasSubstr("a first call cannot be captured"));
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream_, &graph), "end of capture");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  layer.run(stream_);
  layer.expect_right(stream_, options.mask);
}

}  // namespace
}  // namespace annulus
