#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "tests/support/rank_device.hpp"
#include "tests/support/test_world.hpp"

/// The public interface on GPU ranks. Keys are zero, so that output row i is the mean of the values
/// that it sees.
namespace annulus {

using Clock = std::chrono::steady_clock;

inline double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Memory of the current device.
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

/// An object and its tensors. Values are `level` at even positions and 0 at odd ones.
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

  // Uploads its values, too.
  Layer(Context& context, const AttentionOptions& options, float level, cudaStream_t stream)
      : Layer(context, options, level) {
    upload(stream);
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
  // One call; its output is overwritten beforehand.
  void expect_right_call(cudaStream_t stream, const Mask& mask) {
    spoil(stream);
    run(stream);
    expect_right(stream, mask);
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

/// Calls that the caller captures into a graph.
class CapturedCalls {
 public:
  /// Captures the work that `body` submits to the stream, and to streams that follow it.
  template <class Body>
  CapturedCalls(cudaStream_t stream, const Body& body) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin of capture");
    body();
    check_cuda(cudaStreamEndCapture(stream, &graph_), "end of capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  CapturedCalls(Layer& layer, cudaStream_t stream)
      : CapturedCalls(stream, [&] { layer.run(stream); }) {}
  ~CapturedCalls() {
    (void)cudaGraphExecDestroy(executable_);
    (void)cudaGraphDestroy(graph_);
  }
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;
  void launch(cudaStream_t stream) {
    check_cuda(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// For cudaLaunchHostFunc.
inline void CUDART_CB sleep_a_while(void* /*unused*/) {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
}
/// Delays later work on the stream.
inline void delay(cudaStream_t stream) {
  check_cuda(cudaLaunchHostFunc(stream, sleep_a_while, nullptr), "cudaLaunchHostFunc");
}

class DeviceFace : public test::RankDeviceTest<> {
 protected:
  void SetUp() override {
    RankDeviceTest::SetUp();
    if (IsSkipped()) return;
    stream_ = make_stream();
    ContextOptions options;
    options.timeout = 60;
    options.share_gpus = shared_gpus();
    context_ = std::make_unique<Context>(test::session().world(), options);
  }
  void TearDown() override {
    context_.reset();
    for (const cudaStream_t stream : streams_) (void)cudaStreamDestroy(stream);
  }

  /// A stream of the caller, for the rest of the test.
  [[nodiscard]] cudaStream_t make_stream() {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    streams_.push_back(stream);
    return stream;
  }

  [[nodiscard]] static AttentionOptions causal() {
    AttentionOptions options;
    options.shape = {1, Layer::attention_length, Layer::attention_length, 8, 2, 128, 128};
    options.dtype = DType::bfloat16;
    options.mask.set_causal(true);
    return options;
  }

  /// Under a schedule whose kernels do not wait for other ranks.
  [[nodiscard]] AttentionOptions causal_ring() const {
    AttentionOptions options = causal();
    if (context_->size() > 1) options.schedule = "ring";
    return options;
  }

  /// Captures the work that `body` submits into a graph, and drops the graph.
  template <class Body>
  cudaError_t capture_in_vain(const Body& body) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "begin of capture");
    body();
    cudaGraph_t graph = nullptr;
    const cudaError_t code = cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    (void)cudaGetLastError();
    return code;
  }

  /// Two objects whose kernels await columns take turns, although their streams do not.
  void expect_turns(Layer& first, Layer& second, int rounds, const Mask& mask) {
    const cudaStream_t other = make_stream();
    first.upload(stream_);
    second.upload(other);
    for (int round = 0; round < rounds; ++round) {
      first.spoil(stream_);
      second.spoil(other);
      // One of the streams is late, on each rank in turn.
      if (round % 2 == test::session().rank() % 2) delay(stream_);
      for (int call = 0; call < 3; ++call) {
        first.run(stream_);
        second.run(other);
      }
      first.expect_right(stream_, mask);
      second.expect_right(other, mask);
    }
  }

  cudaStream_t stream_ = nullptr;
  std::vector<cudaStream_t> streams_;
  std::unique_ptr<Context> context_;
};

}  // namespace annulus
