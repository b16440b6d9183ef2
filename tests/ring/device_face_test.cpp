// The public interface on GPU ranks: the caller's stream, many objects in turn, and the cost of a
// call and of another object. Keys are zero, so that output row i is the mean of the values that it
// sees.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "tests/support/message_of.hpp"
#include "tests/support/rank_device.hpp"
#include "tests/support/test_world.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// Memory of the current device.
class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t elements) : bytes_(static_cast<std::size_t>(elements) * 2) {
    check_cuda(cudaMalloc(&data_, bytes_), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, bytes_), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(),
               "cudaDeviceSynchronize");  // the test's stream does not wait
  }
  ~DeviceArray() { (void)cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// An object and its tensors. Values are `level` at even positions and 0 at odd ones.
class Layer {
 public:
  Layer(Context& context, const AttentionOptions& options, float level)
      : attention(context, options),
        level_(level),
        query_(attention.query_shape().product()),
        key_(attention.key_shape().product()),
        value_(attention.value_shape().product()),
        output_(attention.output_shape().product()) {
    const std::int64_t width = attention.value_shape()[2] * attention.value_shape()[3];
    const PositionRanges positions = attention.key_positions();
    std::vector<float> wide(static_cast<std::size_t>(attention.value_shape().product()), 0);
    for (std::int64_t row = 0; row < positions.size(); ++row) {
      if (positions.global(LocalPosition(row)).value() % 2 == 0) {
        std::fill_n(wide.begin() + row * width, width, level);
      }
    }
    values_.resize(wide.size());
    from_float32(wide.data(), DType::bfloat16, values_.data(),
                 static_cast<std::int64_t>(wide.size()));
  }

  // From page-locked or ordinary memory, in the stream's order.
  void upload(cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(value_.data(), values_.data(), value_.bytes(),
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
  }
  void run(cudaStream_t stream) { run(attention, stream); }
  void run(Attention& other, cudaStream_t stream) {
    other.run({query_.data(), key_.data(), value_.data(), output_.data()}, stream);
  }
  [[nodiscard]] AttentionOutput compute(cudaStream_t stream) {
    return attention.compute({query_.data(), key_.data(), value_.data()}, true, stream);
  }
  void copy_output(const AttentionOutput& result, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(output_.data(), result.outputs.view().data(), output_.bytes(),
                               cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
  // The same call: what is zero lies as one likes.
  void run_with_zero_queries_head_major(cudaStream_t stream) {
    ring::LocalTensors tensors =
        attention.views({query_.data(), key_.data(), value_.data(), output_.data()});
    const Extents shape = tensors.query.shape();
    tensors.query = ConstTensorView(query_.data(), DType::bfloat16,
                                    {shape[0], shape[2], shape[1], shape[3]}, tensors.query.place())
                        .permute({0, 2, 1, 3});
    attention.run(tensors, stream);
  }
  void spoil(cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(output_.data(), 0xFF, output_.bytes(), stream), "cudaMemsetAsync");
  }
  void expect_right(cudaStream_t stream, const Mask& mask) {
    std::vector<std::uint16_t> narrow(static_cast<std::size_t>(attention.output_shape().product()));
    check_cuda(cudaMemcpyAsync(narrow.data(), output_.data(), output_.bytes(),
                               cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::vector<float> wide(narrow.size());
    to_float32(narrow.data(), DType::bfloat16, wide.data(),
               static_cast<std::int64_t>(narrow.size()));
    const PositionRanges positions = attention.query_positions();
    const std::int64_t width = attention.output_shape()[2] * attention.output_shape()[3];
    for (std::int64_t row = 0; row < positions.size(); ++row) {
      const Mask::Interval seen = mask.row_intervals(0, positions.global(LocalPosition(row)))[1];
      const std::int64_t end = std::min(seen.end.value(), attention_length);
      const std::int64_t even = (end + 1) / 2 - (seen.begin.value() + 1) / 2;
      const auto count = static_cast<float>(end - seen.begin.value());
      const float expected = level_ * static_cast<float>(even) / count;
      ASSERT_NEAR(wide[static_cast<std::size_t>(row * width)], expected, 0.01 * level_) << row;
      ASSERT_NEAR(wide[static_cast<std::size_t>((row + 1) * width - 1)], expected, 0.01 * level_);
    }
  }

  static constexpr std::int64_t attention_length = 1536;
  Attention attention;

 private:
  float level_;
  DeviceArray query_, key_, value_, output_;
  std::vector<std::uint16_t> values_;
};

class DeviceFace : public test::RankDeviceTest<> {
 protected:
  void SetUp() override {
    RankDeviceTest::SetUp();
    if (IsSkipped()) return;
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    ContextOptions options;
    options.timeout = 60;
    options.share_gpus = shared_gpus();
    context_ = std::make_unique<Context>(test::session().world(), options);
  }
  void TearDown() override {
    context_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  [[nodiscard]] static AttentionOptions causal() {
    AttentionOptions options;
    options.shape = {1, Layer::attention_length, Layer::attention_length, 8, 2, 128, 128};
    options.dtype = DType::bfloat16;
    options.mask.set_causal(true);
    return options;
  }

  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Context> context_;
};

TEST_F(DeviceFace, GpusAreNotSharedUnasked) {
  ContextOptions options;
  options.timeout = 60;
  if (!shared_gpus()) {
    EXPECT_NO_THROW(Context(test::session().world(), options));
    return;
  }
  EXPECT_THAT(test::message_of<UserError>([&] { Context(test::session().world(), options); }),
              HasSubstr("compute on the same GPU"));
  // Nor where one rank alone does not ask for it.
  options.share_gpus = test::session().rank() != 0;
  EXPECT_THROW(Context(test::session().world(), options), UserError);
}

TEST_F(DeviceFace, AContextLeavesAnotherDeviceCurrent) {
  if (test::session().size() > 1) GTEST_SKIP() << "needs one rank";
  if (cuda_devices().size() < 2) GTEST_SKIP() << "needs two GPUs";
  ContextOptions options;
  options.place = Place::cuda(1);
  const AttentionOptions options_of_layer = causal();
  Context context(options);
  Attention attention(context, options_of_layer);
  int current = -1;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  EXPECT_EQ(current, 0);
}

// With keys of zero, every logit is 0: a row's sum counts what it sees, its output adds that up.
TEST_F(DeviceFace, UnnormalisedOutputs) {
  AttentionOptions options = causal();
  options.normalize_output = false;
  Attention attention(*context_, options);
  const DeviceArray query(attention.query_shape().product());
  const DeviceArray key(attention.key_shape().product());
  const DeviceArray value(attention.value_shape().product());
  const std::vector<std::uint16_t> ones(static_cast<std::size_t>(attention.value_shape().product()),
                                        0x3f80);
  check_cuda(
      cudaMemcpyAsync(value.data(), ones.data(), value.bytes(), cudaMemcpyHostToDevice, stream_),
      "cudaMemcpyAsync");
  for (int call = 0; call < 3; ++call) {  // prepared, recorded, replayed
    const AttentionOutput result =
        attention.compute({query.data(), key.data(), value.data()}, true, stream_);
    EXPECT_FALSE(result.lse.has_value());
    const auto host = [&](const Tensor& tensor) {
      std::vector<std::byte> bytes(tensor.bytes());
      check_cuda(cudaMemcpyAsync(bytes.data(), tensor.view().data(), bytes.size(),
                                 cudaMemcpyDeviceToHost, stream_),
                 "cudaMemcpyAsync");
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      std::vector<float> wide(static_cast<std::size_t>(tensor.shape().product()));
      to_float32(bytes.data(), tensor.dtype(), wide.data(), tensor.shape().product());
      return wide;
    };
    const std::vector<float> output = host(result.outputs);
    const std::vector<float> maximum = host(*result.maximum);
    const std::vector<float> sum = host(*result.sum);
    const PositionRanges positions = attention.query_positions();
    const std::int64_t width = attention.output_shape()[2] * attention.output_shape()[3];
    for (std::int64_t row = 0; row < positions.size(); ++row) {
      const auto seen = static_cast<float>(positions.global(LocalPosition(row)).value() + 1);
      ASSERT_EQ(maximum[static_cast<std::size_t>(row)], 0);
      ASSERT_NEAR(sum[static_cast<std::size_t>(row)], seen, 1e-4F * seen);
      ASSERT_NEAR(output[static_cast<std::size_t>(row * width)], seen, 5e-3F * seen);
    }
  }
}

void CUDART_CB sleep_a_while(void* /*unused*/) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

// A call starts after earlier work on its stream, later work there starts after the call, and the
// host waits for neither.
TEST_F(DeviceFace, ACallHasItsPlaceInTheCallersStream) {
  const AttentionOptions options = causal();
  Layer layer(*context_, options, 3);
  for (int call = 0; call < 4; ++call) {  // prepared, recorded, replayed
    layer.spoil(stream_);
    context_->mesh().world().barrier();
    check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
    const auto begin = Clock::now();
    layer.upload(stream_);
    const double uploaded = milliseconds_since(begin);
    layer.run(stream_);
    if (call > 1 && uploaded < 50) {
      EXPECT_LT(milliseconds_since(begin), 90) << "the host waited";
    }
    layer.expect_right(stream_, options.mask);
    layer.attention.wait();
  }
}

// 64 layers of a network on one context, under a schedule whose kernels do not wait for other
// ranks.
TEST_F(DeviceFace, ManyObjectsInTurnAllReplay) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  std::vector<std::unique_ptr<Layer>> layers;
  for (int i = 0; i < 64; ++i) {
    layers.push_back(
        std::make_unique<Layer>(*context_, options, 1 + 0.25F * static_cast<float>(i)));
    layers.back()->upload(stream_);
  }
  constexpr std::size_t kRounds = 5;
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (const auto& layer : layers) layer->spoil(stream_);
    for (const auto& layer : layers) layer->run(stream_);
    for (const auto& layer : layers) layer->expect_right(stream_, options.mask);
  }
  for (const auto& layer : layers) {
    EXPECT_GE(layer->attention.replays(), kRounds - 2);
  }
}

// Into a graph of the caller, whatever the object has recorded itself by then.
TEST_F(DeviceFace, ACallCanBeCaptured) {
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
TEST_F(DeviceFace, AGraphComputesWhatWasCapturedWhateverComesLater) {
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

TEST_F(DeviceFace, GraphsAndOtherCallsTakeTurnsWhateverTheirStreams) {
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

TEST_F(DeviceFace, WaitingIncludesLaunchedGraphs) {
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

TEST_F(DeviceFace, AFirstCallCannotBeCaptured) {
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

// A kernel that awaits columns keeps its multiprocessors. Two such kernels, each waiting for ranks
// that compute the other, would wait for ever.
TEST_F(DeviceFace, ObjectsThatAwaitColumnsTakeTurnsWhateverTheirStreams) {
  if (context_->size() == 1 || shared_gpus()) GTEST_SKIP() << "needs two GPUs";
  AttentionOptions options = causal();
  options.schedule = "allgather";
  options.implementation = "flash_attn2";
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  const auto blocks = first.attention.rank_plan().all<ring::Block>();
  ASSERT_TRUE(std::any_of(blocks.begin(), blocks.end(),
                          [](const ring::Block* block) { return block->awaits_columns; }));
  cudaStream_t other = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  first.upload(stream_);
  second.upload(other);
  for (int round = 0; round < 20; ++round) {
    first.spoil(stream_);
    second.spoil(other);
    // One of the streams is late, on each rank in turn.
    if (round % 2 == test::session().rank() % 2) {
      check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
    }
    for (int call = 0; call < 3; ++call) {
      first.run(stream_);
      second.run(other);
    }
    first.expect_right(stream_, options.mask);
    second.expect_right(other, options.mask);
  }
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

// What a call under way still uses does not go to the next object.
TEST_F(DeviceFace, ObjectsMayEndWhileTheirCallsAreUnderWay) {
  const AttentionOptions options = causal();
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  first.upload(stream_);
  second.upload(stream_);
  for (int round = 0; round < 5; ++round) {
    for (Layer* layer : {&first, &second}) {
      layer->spoil(stream_);
      check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
      {
        Attention brief(*context_, options);
        layer->run(brief, stream_);
      }
      Attention next(*context_, options);  // would take the memory of the brief one
      layer->expect_right(stream_, options.mask);
    }
  }
}

// The caller's exception ends one object. What another one has under way on the same transport
// waits for a rank that is late, and must go on waiting.
TEST_F(DeviceFace, AnExceptionOfTheCallerSpoilsNoOtherObject) {
  AttentionOptions options = causal();
  if (context_->size() > 1) options.schedule = "ring";
  Layer other(*context_, options, 3);
  other.upload(stream_);
  other.run(stream_);
  other.expect_right(stream_, options.mask);
  other.spoil(stream_);
  Layer next(*context_, options, 7);
  next.upload(stream_);
  const auto leave = [&] {
    Attention ended(*context_, options);
    next.run(ended, stream_);
    next.expect_right(stream_, options.mask);
    context_->mesh().world().barrier();
    if (test::session().rank() == 0) {
      for (int i = 0; i < 10; ++i) {
        check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
      }
    }
    other.run(stream_);
    throw std::runtime_error("the caller's own");
  };
  EXPECT_THROW(leave(), std::runtime_error);
  other.expect_right(stream_, options.mask);
  for (int call = 0; call < 3; ++call) {
    other.spoil(stream_);
    other.run(stream_);
    other.expect_right(stream_, options.mask);
  }
  next.run(stream_);
  next.expect_right(stream_, options.mask);
}

// Tensors with other strides, one call right after the other.
TEST_F(DeviceFace, TensorsMayLieOtherwiseWhileCallsAreUnderWay) {
  const AttentionOptions options = causal();
  Layer layer(*context_, options, 4);
  layer.upload(stream_);
  for (int round = 0; round < 4; ++round) {
    layer.spoil(stream_);
    check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
    layer.run(stream_);
    layer.run_with_zero_queries_head_major(stream_);
    layer.expect_right(stream_, options.mask);
  }
}

TEST_F(DeviceFace, MasksAreReplacedFromCallToCall) {
  AttentionOptions options = causal();
  Layer layer(*context_, options, 2);
  layer.upload(stream_);
  for (const std::int32_t length : {700, 1536, 1}) {
    Mask mask;
    mask.set_causal(true);
    mask.set_kv_lengths({length});
    const auto begin = Clock::now();
    layer.attention.set_mask(mask);
    std::printf("mask replaced in %.2f ms\n", milliseconds_since(begin));
    for (int call = 0; call < 3; ++call) {
      layer.spoil(stream_);
      layer.run(stream_);
      layer.expect_right(stream_, mask);
    }
  }
}

// The stream still reads a result when it is dropped; a call on another stream must not get its
// memory.
TEST_F(DeviceFace, ResultsMayBeDroppedWhileTheirStreamStillReadsThem) {
  AttentionOptions options = causal();
  Layer first(*context_, options, 3);
  Layer second(*context_, options, 7);
  cudaStream_t other = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  first.upload(stream_);
  second.upload(other);
  first.run(stream_);
  second.run(other);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int round = 0; round < 4; ++round) {
    first.spoil(stream_);
    {
      const AttentionOutput result = first.compute(stream_);
      check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
      first.copy_output(result, stream_);
    }
    { const AttentionOutput result = second.compute(other); }
    check_cuda(cudaStreamSynchronize(other), "cudaStreamSynchronize");
    first.expect_right(stream_, options.mask);
  }
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

// A second context opens the same GPU anew.
TEST_F(DeviceFace, ContextsOnOneGpuTakeTurnsWhereKernelsAwaitColumns) {
  if (context_->size() == 1 || shared_gpus()) GTEST_SKIP() << "needs two GPUs";
  ContextOptions more;
  more.timeout = 20;
  Context second_context(test::session().world(), more);
  EXPECT_EQ(&context_->device().awaiting_calls(), &second_context.device().awaiting_calls());
  AttentionOptions options = causal();
  options.schedule = "allgather";
  options.implementation = "flash_attn2";
  Layer first(*context_, options, 1);
  Layer second(second_context, options, 5);
  cudaStream_t other = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  first.upload(stream_);
  second.upload(other);
  for (int round = 0; round < 10; ++round) {
    first.spoil(stream_);
    second.spoil(other);
    if (round % 2 == test::session().rank() % 2) {
      check_cuda(cudaLaunchHostFunc(stream_, sleep_a_while, nullptr), "cudaLaunchHostFunc");
    }
    for (int call = 0; call < 3; ++call) {
      first.run(stream_);
      second.run(other);
    }
    first.expect_right(stream_, options.mask);
    second.expect_right(other, options.mask);
  }
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

// Times that users notice: another object of a known shape, and a replayed call.
TEST_F(DeviceFace, ObjectsAndCallsAreCheap) {
  for (const std::string implementation : {"sdpa", "flash_attn2"}) {
    AttentionOptions options = causal();
    options.implementation = implementation;
    if (!context_->registry().get(implementation).available(context_->place())) continue;
    std::vector<double> prepared;
    std::unique_ptr<Layer> layer;
    for (int i = 0; i < 6; ++i) {
      context_->mesh().world().barrier();
      const auto begin = Clock::now();
      const Attention attention(*context_, options);
      prepared.push_back(milliseconds_since(begin));
    }
    layer = std::make_unique<Layer>(*context_, options, 1);
    layer->upload(stream_);
    std::vector<double> enqueued;
    for (int call = 0; call < 200; ++call) {
      const auto begin = Clock::now();
      layer->run(stream_);
      if (call >= 10) enqueued.push_back(milliseconds_since(begin));
      if (call % 10 == 9) check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }
    layer->expect_right(stream_, options.mask);
    std::sort(prepared.begin() + 1, prepared.end());
    std::sort(enqueued.begin(), enqueued.end());
    const double again = prepared[prepared.size() / 2];
    const double call = enqueued[enqueued.size() / 2];
    std::printf("%s: first object %.2f ms, another %.2f ms, a call enqueued in %.1f us\n",
                implementation.c_str(), prepared.front(), again, 1e3 * call);
    EXPECT_LT(again, 5) << implementation;
    EXPECT_LT(call, 0.1) << implementation;
  }
}

// A rank stops for ever, as far as the others can tell, while rank 0 waits by CUDA's means alone.
TEST_F(DeviceFace, ALostRankDoesNotBlockTheCallersOwnSynchronisation) {
  if (context_->size() != 2 || shared_gpus()) GTEST_SKIP() << "needs two GPUs";
  const std::vector<std::string> processes =
      context_->mesh().world().gather_text(std::to_string(::getpid()));
  for (const Transport transport : {Transport::peer, Transport::nccl}) {
    ContextOptions more;
    more.timeout = 3;
    more.transport = transport;
    Context context(test::session().world(), more);
    AttentionOptions options = causal();
    options.schedule = "ring";
    Layer layer(context, options, 2);
    layer.upload(stream_);
    for (int call = 0; call < 3; ++call) layer.run(stream_);
    layer.expect_right(stream_, options.mask);
    context.mesh().world().barrier();
    if (context.rank() == 1) {
      ::raise(SIGSTOP);
      continue;
    }
    // Whatever fails here, the other rank goes on, or both would hang.
    const std::shared_ptr<void> resume(
        nullptr, [&](void*) { ::kill(static_cast<pid_t>(std::stol(processes[1])), SIGCONT); });
    layer.run(stream_);
    const auto begin = Clock::now();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_GE(milliseconds_since(begin), 2500);
    EXPECT_LT(milliseconds_since(begin), 20000);
    const std::string message = test::message_of<TimeoutError>([&] { layer.attention.wait(); });
    EXPECT_THAT(message, HasSubstr("step "));
    EXPECT_THAT(message, HasSubstr("rank 1"));
    EXPECT_THROW(layer.run(stream_), TimeoutError);
  }
}

}  // namespace
}  // namespace annulus
