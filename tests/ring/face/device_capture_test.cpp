// Calls of the public interface that the caller captures into CUDA graphs.
#include <cuda_runtime_api.h>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/cuda.hpp>

#include "tests/ring/face/device_face_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;

using DeviceCapture = DeviceFace;

// Into a graph of the caller, whatever the object has recorded itself by then.
TEST_F(DeviceCapture, ACallCanBeCaptured) {
  AttentionOptions options = causal_ring();
  for (const int calls_before : {1, 2, 3}) {
    SCOPED_TRACE(calls_before);
    Layer layer(*context_, options, 3, stream_);
    for (int i = 0; i < calls_before; ++i) layer.run(stream_);
    CapturedCalls graph(layer, stream_);
    for (int round = 0; round < 3; ++round) {
      layer.spoil(stream_);
      graph.launch(stream_);
      layer.expect_right(stream_, options.mask);
      layer.spoil(stream_);
      layer.run(stream_);  // beside the graph
      layer.expect_right(stream_, options.mask);
    }
  }
}

// Other strides and another mask take other kernels, memory and exchanges.
TEST_F(DeviceCapture, AGraphComputesWhatWasCapturedWhateverComesLater) {
  AttentionOptions options = causal_ring();
  Layer layer(*context_, options, 3, stream_);
  layer.run(stream_);
  auto graph = std::make_unique<CapturedCalls>(layer, stream_);
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
    layer.expect_right_call(stream_, window);
    expect_captured();
  }
  // Memory for another set of buffers, which must not be that of the graph.
  Layer next(*context_, options, 7, stream_);
  next.run(stream_);
  next.expect_right(stream_, options.mask);
  expect_captured();
  graph.reset();
  layer.attention.set_mask(options.mask);
  layer.expect_right_call(stream_, options.mask);
}

TEST_F(DeviceCapture, GraphsAndOtherCallsTakeTurnsWhateverTheirStreams) {
  AttentionOptions options = causal_ring();
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  const cudaStream_t other = make_stream();
  first.upload(stream_);
  second.upload(other);
  first.run(stream_);
  second.run(other);
  CapturedCalls graph(first, stream_);
  for (int round = 0; round < 20; ++round) {
    first.spoil(stream_);
    second.spoil(other);
    // One of the streams is late, on each rank in turn.
    const cudaStream_t late = round % 2 == test::session().rank() % 2 ? stream_ : other;
    delay(late);
    for (int call = 0; call < 3; ++call) {
      graph.launch(stream_);
      second.run(other);
    }
    first.expect_right(stream_, options.mask);
    second.expect_right(other, options.mask);
  }
  second.attention.wait();
}

TEST_F(DeviceCapture, WaitingIncludesLaunchedGraphs) {
  AttentionOptions options = causal_ring();
  const auto layer = std::make_unique<Layer>(*context_, options, 3);
  layer->upload(stream_);
  layer->run(stream_);
  CapturedCalls graph(*layer, stream_);
  layer->attention.wait();
  delay(stream_);
  graph.launch(stream_);
  const auto begin = Clock::now();
  layer->attention.wait();
  EXPECT_GE(milliseconds_since(begin), 50);
  layer->expect_right(stream_, options.mask);
}

// The object is destroyed, and another one takes what memory there is.
TEST_F(DeviceCapture, AGraphOutlivesItsObject) {
  AttentionOptions options = causal_ring();
  Layer layer(*context_, options, 3, stream_);
  auto captured = std::make_unique<Attention>(*context_, options);
  layer.run(*captured, stream_);
  auto graph = std::make_unique<CapturedCalls>(stream_, [&] { layer.run(*captured, stream_); });
  captured.reset();
  for (int round = 0; round < 3; ++round) {
    Layer next(*context_, options, 7, stream_);
    next.run(stream_);
    next.expect_right(stream_, options.mask);
    layer.spoil(stream_);
    graph->launch(stream_);
    layer.expect_right(stream_, options.mask);
  }
  graph.reset();
  const Attention last(*context_, options);  // asks who still needs the first one
}

// Both branches use the memory and flags of the context.
TEST_F(DeviceCapture, CallsOnForkedStreamsOfOneCaptureTakeTurns) {
  AttentionOptions options = causal_ring();
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  cudaStream_t other = nullptr;
  cudaEvent_t event = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  const auto order = [&](cudaStream_t before, cudaStream_t after) {
    check_cuda(cudaEventRecord(event, before), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(after, event, 0), "cudaStreamWaitEvent");
  };
  for (Layer* layer : {&first, &second}) {
    layer->upload(stream_);
    layer->run(stream_);
  }
  const auto run_on_both = [&] {
    order(stream_, other);
    for (int call = 0; call < 4; ++call) {
      first.run(stream_);
      second.run(other);
    }
    order(other, stream_);
  };
  CapturedCalls graph(stream_, run_on_both);
  for (int round = 0; round < 10; ++round) {
    first.spoil(stream_);
    second.spoil(stream_);
    graph.launch(stream_);
    first.expect_right(stream_, options.mask);
    second.expect_right(stream_, options.mask);
  }
  check_cuda(cudaEventDestroy(event), "cudaEventDestroy");
}

// Over every transport: what fails in a capture has sent nothing.
TEST_F(DeviceCapture, WhatCannotBeDoneWhileCapturingSpoilsNothing) {
  AttentionOptions options = causal_ring();
  Layer layer(*context_, options, 3, stream_);
  layer.run(stream_);
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  const auto capture = [&](const auto& body) {
    const cudaError_t code = capture_in_vain(body);
    layer.expect_right_call(stream_, options.mask);
    return code;
  };
  EXPECT_EQ(capture([&] {
              layer.run(stream_);
              EXPECT_THROW(layer.attention.wait(), UnsupportedError);
              Mask window = options.mask;
              window.set_window(200, 0);
              EXPECT_THROW(layer.attention.set_mask(window), Error);
            }),
            cudaSuccess);
  EXPECT_EQ(capture([&] {
              EXPECT_NE(cudaStreamSynchronize(stream_), cudaSuccess);  // makes it invalid
              (void)cudaGetLastError();
              EXPECT_THROW(layer.run(stream_), UnsupportedError);
            }),
            cudaErrorStreamCaptureInvalidated);
}

// Also on ranks none of whose kernels waits: rank 0 sees only its own keys.
TEST_F(DeviceCapture, AllRanksRefuseToCaptureKernelsThatWait) {
  AttentionOptions options = causal();
  options.schedule = "allgather";
  options.implementation = "flash_attn2";
  options.layout = LayoutKind::contiguous;
  if (context_->size() == 1 || shared_gpus() ||
      !context_->registry().get(options.implementation).available(context_->place())) {
    GTEST_SKIP() << "needs flash_attn2 and a GPU for each of several ranks";
  }
  Layer layer(*context_, options, 3, stream_);
  layer.run(stream_);
  EXPECT_EQ(capture_in_vain([&] { EXPECT_THROW(layer.run(stream_), UnsupportedError); }),
            cudaSuccess);
  layer.expect_right_call(stream_, options.mask);
}

TEST_F(DeviceCapture, AStreamOfAnotherDeviceIsRefused) {
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) GTEST_SKIP() << "needs two GPUs that one process sees";
  AttentionOptions options = causal_ring();
  Layer layer(*context_, options, 3, stream_);
  layer.run(stream_);
  const int mine = context_->place().device;
  cudaStream_t other = nullptr;
  check_cuda(cudaSetDevice((mine + 1) % devices), "cudaSetDevice");
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  EXPECT_THROW(layer.run(other), ArgumentError);
  check_cuda(cudaSetDevice(mine), "cudaSetDevice");
  layer.expect_right_call(stream_, options.mask);
}

TEST_F(DeviceCapture, AFirstCallCannotBeCaptured) {
  AttentionOptions options = causal_ring();
  Layer layer(*context_, options, 3, stream_);
  EXPECT_EQ(capture_in_vain([&] {
              EXPECT_THAT(test::message_of<UnsupportedError>([&] { layer.run(stream_); }),
                          HasSubstr("a first call cannot be captured"));
            }),
            cudaSuccess);
  layer.run(stream_);
  layer.expect_right(stream_, options.mask);
}

}  // namespace
}  // namespace annulus
