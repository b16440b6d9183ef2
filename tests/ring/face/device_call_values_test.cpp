// Lengths, offsets and seeds that GPUs read from their own memory, through the public interface.
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "tests/ring/face/device_face_fixture.hpp"
#include "tests/ring/face/face_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A vector's twin in the memory of the current device.
template <class T>
class Twin {
 public:
  Twin(const std::vector<T>& host, cudaStream_t stream) : bytes_(host.size() * sizeof(T)) {
    check_cuda(cudaMalloc(&data_, bytes_), "cudaMalloc");
    upload(host, stream);
  }
  ~Twin() { (void)cudaFree(data_); }
  Twin(const Twin&) = delete;
  Twin& operator=(const Twin&) = delete;

  // In the stream's order; the host memory may change when it returns.
  void upload(const std::vector<T>& host, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(data_, host.data(), bytes_, cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  void download(std::vector<T>& host, cudaStream_t stream) const {
    check_cuda(cudaMemcpyAsync(host.data(), data_, bytes_, cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  [[nodiscard]] T* data() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// The values of calls, at addresses that stay.
class ValuesOnDevice {
 public:
  ValuesOnDevice(Place place, cudaStream_t stream) : place_(place), stream_(stream) {}

  void set(const Values& values) {
    set(query_lengths_, values.query_lengths);
    set(kv_lengths_, values.kv_lengths);
    set(offsets_, values.offsets);
    if (!values.sinks.empty()) {
      sinks_ ? sinks_->upload(values.sinks, stream_) : void(sinks_.emplace(values.sinks, stream_));
    }
    if (values.seed) {
      const std::vector<std::uint64_t> seed{*values.seed};
      seed_ ? seed_->upload(seed, stream_) : void(seed_.emplace(seed, stream_));
    }
  }
  [[nodiscard]] ring::CallValues views() const {
    ring::CallValues views{view(query_lengths_), view(kv_lengths_), view(offsets_)};
    if (seed_) views.device_dropout_seed = seed_->data();
    if (sinks_) views.sinks = {sinks_->data(), DType::float32, {4, 1}, place_};
    return views;
  }

 private:
  struct Row {
    std::optional<Twin<std::int32_t>> twin;
    std::int64_t count = 0;
  };
  void set(Row& row, const Numbers& numbers) {
    if (numbers.empty()) return;
    row.count = std::ssize(numbers);
    row.twin ? row.twin->upload(numbers, stream_) : void(row.twin.emplace(numbers, stream_));
  }
  [[nodiscard]] ConstTensorView view(const Row& row) const {
    if (!row.twin) return {};
    return {row.twin->data(), DType::int32, {row.count}, place_};
  }

  Place place_;
  cudaStream_t stream_;
  Row query_lengths_, kv_lengths_, offsets_;
  std::optional<Twin<std::uint64_t>> seed_;
  std::optional<Twin<float>> sinks_;
};

// A rank's tensors of the forward and the backward pass.
class PassTensors {
 public:
  PassTensors(const Attention& attention, int seed, cudaStream_t stream)
      : attention_(attention),
        seed_(seed),
        stream_(stream),
        shards_(attention, seed),
        grad_output_(filled(attention, seed)),
        query_(shards_.query, stream),
        key_(shards_.key, stream),
        value_(shards_.value, stream),
        output_(shards_.output, stream),
        lse_(shards_.lse, stream),
        upstream_(grad_output_, stream),
        grad_query_(shards_.query, stream),
        grad_key_(shards_.key, stream),
        grad_value_(shards_.value, stream),
        grad_sinks_({0, 0, 0, 0}, stream) {}

  [[nodiscard]] AttentionTensors forward(const ring::CallValues& values) const {
    AttentionTensors tensors{query_.data(), key_.data(), value_.data(), output_.data(),
                             lse_.data()};
    tensors.call_values = values;
    return tensors;
  }
  [[nodiscard]] BackwardTensors backward(const ring::CallValues& values) const {
    BackwardTensors tensors{query_.data(),      key_.data(),      value_.data(),
                            output_.data(),     lse_.data(),      upstream_.data(),
                            grad_query_.data(), grad_key_.data(), grad_value_.data()};
    tensors.call_values = values;
    if (values.sinks.rank() > 0) tensors.grad_sinks = grad_sinks_.data();
    return tensors;
  }
  void spoil() {
    output_.upload(std::vector<float>(shards_.output.size(), NAN), stream_);
    lse_.upload(std::vector<float>(shards_.lse.size(), NAN), stream_);
  }
  [[nodiscard]] std::vector<float> lse() const {
    std::vector<float> values(shards_.lse.size());
    lse_.download(values, stream_);
    return values;
  }
  void expect_right_results(const AttentionOptions& called) {
    output_.download(shards_.output, stream_);
    lse_.download(shards_.lse, stream_);
    expect_right(attention_, called, shards_, seed_, true);
  }
  void expect_right_gradients(const AttentionOptions& called) const {
    std::vector<float> query(shards_.query.size()), key(shards_.key.size()),
        value(shards_.value.size());
    grad_query_.download(query, stream_);
    grad_key_.download(key, stream_);
    grad_value_.download(value, stream_);
    std::vector<float> sinks;
    if (called.sinks) {
      sinks.resize(4);
      grad_sinks_.download(sinks, stream_);
    }
    expect_right_gradient(attention_, called, seed_, query, key, value, sinks);
  }

 private:
  static std::vector<float> filled(const Attention& attention, int seed) {
    std::vector<float> values;
    Shards::fill(values, attention.output_shape(), attention.query_positions(), seed + 3);
    return values;
  }

  const Attention& attention_;
  int seed_;
  cudaStream_t stream_;
  Shards shards_;
  std::vector<float> grad_output_;
  Twin<float> query_, key_, value_, output_, lse_, upstream_, grad_query_, grad_key_, grad_value_,
      grad_sinks_;
};

class DeviceCallValues : public DeviceFace {
 protected:
  [[nodiscard]] static Place place() { return device().place(); }

  // One object computes all calls, forward and backward, several times each, so that recordings
  // serve them too.
  void expect_right_calls(AttentionOptions options, const std::vector<Values>& calls) {
    const bool alone = context_->size() == 1;
    for (const std::string schedule : {"local", "ring", "allgather", "ulysses"}) {
      if ((schedule == "local") != alone) continue;
      SCOPED_TRACE(schedule);
      options.schedule = schedule;
      options.implementation = "native";
      Attention attention(*context_, options);
      const ring::RankPlan* const plan = &attention.rank_plan();
      PassTensors pass(attention, 3, stream_);
      ValuesOnDevice on_device(place(), stream_);
      constexpr std::size_t kRounds = 3;
      for (std::size_t round = 0; round < kRounds; ++round) {
        for (const Values& values : calls) {
          on_device.set(values);
          const AttentionOptions called = values.applied(options);
          pass.spoil();
          attention.run(pass.forward(on_device.views()), stream_);
          attention.backward(pass.backward(on_device.views()), stream_);
          pass.expect_right_results(called);
          pass.expect_right_gradients(called);
        }
      }
      EXPECT_EQ(&attention.rank_plan(), plan) << "something was planned again";
      EXPECT_GE(attention.replays(), kRounds * calls.size() - 2);
      EXPECT_NO_THROW(attention.wait());
    }
  }
};

TEST_F(DeviceCallValues, Lengths) {
  AttentionOptions options = annulus::causal(37);
  options.call_arguments.lengths = true;
  options.mask.set_kv_lengths({37, 30});
  expect_right_calls(options, {{.query_lengths = {37, 37}, .kv_lengths = {9, 30}},
                               {.query_lengths = {37, 36}, .kv_lengths = {37, 0}},
                               {.query_lengths = {20, 0}, .kv_lengths = {11, 1}}});
}

TEST_F(DeviceCallValues, OffsetsAndSeeds) {
  AttentionOptions options = annulus::causal(37);
  options.mask.set_window(9, 3);
  options.mask.set_sink_tokens(2);
  options.dropout.emplace(0.3, 8);
  options.call_arguments = {false, true, true};
  expect_right_calls(options, {{.offsets = {3}, .seed = 9},
                               {.offsets = {-20}, .seed = 0xfeedfacecafebeefU},
                               {.offsets = {2147483647}, .seed = 8}});
}

TEST_F(DeviceCallValues, Sinks) {
  AttentionOptions options = annulus::causal(37);
  options.sinks = Sinks({4, 1}, {0, 1, -1, 0.5F});
  expect_right_calls(options, {{.sinks = {3, -2, 0, 1}}, {.sinks = {0.5F, 1, 0.25F, 7}}});
}

TEST_F(DeviceCallValues, ASinkThatIsNotANumberStaysOne) {
  AttentionOptions options = annulus::causal(37);
  options.sinks = Sinks({4, 1}, {0, 1, -1, 0.5F});
  options.schedule = context_->size() == 1 ? "local" : "ring";
  options.implementation = "native";
  Attention attention(*context_, options);
  const PassTensors pass(attention, 3, stream_);
  ValuesOnDevice on_device(place(), stream_);
  on_device.set({.sinks = {NAN, 0, 0, 0}});
  attention.run(pass.forward(on_device.views()), stream_);
  const Extents shape = attention.lse_shape();  // [b,n,t]
  const std::vector<float> lse = pass.lse();
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const bool first_head = static_cast<std::int64_t>(i) / shape[2] % shape[1] == 0;
    EXPECT_EQ(std::isnan(lse[i]), first_head) << i;
  }
}

// Values of the host and of the device side by side.
TEST_F(DeviceCallValues, OfBothMemories) {
  AttentionOptions options = annulus::causal(37);
  options.call_arguments = {true, true, false};
  if (context_->size() > 1) options.schedule = "ring";
  Attention attention(*context_, options);
  PassTensors pass(attention, 5, stream_);
  ValuesOnDevice on_device(place(), stream_);
  on_device.set({.kv_lengths = {20, 33}});
  const Numbers offsets{4, -7};
  for (const std::int32_t last : {33, 2, 37}) {
    on_device.set({.kv_lengths = {20, last}});
    ring::CallValues values = on_device.views();
    values.offsets = Values::view(offsets);
    pass.spoil();
    attention.run(pass.forward(values), stream_);
    pass.expect_right_results(
        Values{.kv_lengths = {20, last}, .offsets = offsets}.applied(options));
  }
}

// As a generation loop does: the graph is captured once, and the lengths grow.
TEST_F(DeviceCallValues, AreReadByEveryLaunchOfACapturedGraph) {
  AttentionOptions options = annulus::causal(37);
  options.mask.set_causal(false);
  options.call_arguments.lengths = true;
  if (context_->size() > 1) options.schedule = "ring";
  Attention attention(*context_, options);
  PassTensors pass(attention, 7, stream_);
  ValuesOnDevice on_device(place(), stream_);
  on_device.set({.kv_lengths = {1, 2}});
  attention.run(pass.forward(on_device.views()), stream_);
  CapturedCalls graph(stream_, [&] { attention.run(pass.forward(on_device.views()), stream_); });
  for (const std::int32_t length : {3, 17, 37}) {
    const Values values{.kv_lengths = {length, length - 1}};
    on_device.set(values);
    pass.spoil();
    graph.launch(stream_);
    pass.expect_right_results(values.applied(options));
  }
}

// The call computes with the nearest length that is allowed.
TEST_F(DeviceCallValues, WaitTellsOfLengthsOutOfBounds) {
  AttentionOptions options = annulus::causal(37);
  options.call_arguments.lengths = true;
  options.mask.set_kv_lengths({37, 30});
  if (context_->size() > 1) options.schedule = "ring";
  Attention attention(*context_, options);
  PassTensors pass(attention, 3, stream_);
  ValuesOnDevice on_device(place(), stream_);
  const auto call = [&](const Numbers& lengths) {
    on_device.set({.kv_lengths = lengths});
    pass.spoil();
    attention.run(pass.forward(on_device.views()), stream_);
  };
  for (int round = 0; round < 2; ++round) {
    call({12, 31});
    pass.expect_right_results(Values{.kv_lengths = {12, 30}}.applied(options));
    EXPECT_THAT(test::message_of<UserError>([&] { attention.wait(); }),
                AllOf(HasSubstr("rank " + std::to_string(context_->rank())),
                      HasSubstr("kv_lengths: got 31 in batch 1, expected 0 to 30, as planned")));
    call({-5, 7});
    EXPECT_THAT(test::message_of<UserError>([&] { attention.wait(); }),
                HasSubstr("kv_lengths: got -5 in batch 0, expected 0 to 37, as planned"));
    call({5, 7});
    EXPECT_NO_THROW(attention.wait());
    pass.expect_right_results(Values{.kv_lengths = {5, 7}}.applied(options));
  }
}

// An error that comes to light in set_mask() leaves the plans of both passes as they were.
TEST_F(DeviceCallValues, ALateErrorKeepsThePlansOfOneMask) {
  AttentionOptions options = annulus::causal(37);
  options.call_arguments.lengths = true;
  options.mask.set_kv_lengths({37, 30});
  if (context_->size() > 1) options.schedule = "ring";
  options.backward.implementation = "native";
  Attention attention(*context_, options);
  PassTensors pass(attention, 3, stream_);
  ValuesOnDevice on_device(place(), stream_);
  const auto call = [&](const Numbers& lengths) {
    on_device.set({.kv_lengths = lengths});
    attention.run(pass.forward(on_device.views()), stream_);
    attention.backward(pass.backward(on_device.views()), stream_);
  };
  const auto expect_right_under = [&](const Mask& mask) {
    call({5, 7});
    AttentionOptions called = Values{.kv_lengths = {5, 7}}.applied(options);
    called.mask = mask;
    called.mask.set_kv_lengths({5, 7});
    pass.expect_right_results(called);
    pass.expect_right_gradients(called);
  };
  Mask window = options.mask;
  window.set_window(4, 0);
  call({12, 31});
  EXPECT_THROW(attention.set_mask(window), UserError);
  expect_right_under(options.mask);
  attention.set_mask(window);
  expect_right_under(window);
}

TEST_F(DeviceCallValues, WrongOnesAreErrors) {
  AttentionOptions options = annulus::causal(37);
  options.dropout.emplace(0.3, 8);
  options.call_arguments = {true, false, true};
  const auto message = [&](const ring::CallValues& values) {
    Attention attention(*context_, options);
    const PassTensors pass(attention, 3, stream_);
    return test::message_of<UserError>([&] { attention.run(pass.forward(values), stream_); });
  };
  const Numbers two{1, 2};
  EXPECT_THAT(
      message({.kv_lengths = {two.data(), DType::int32, {2}, Place::cuda(64)}}),
      HasSubstr("kv_lengths: got memory of cuda:64, expected host memory or that of cuda:"));
  const std::uint64_t seed = 3;
  ring::CallValues both;
  both.dropout_seed = seed;
  both.device_dropout_seed = &seed;
  EXPECT_THAT(message(both), HasSubstr("expected none beside a seed as a number"));
}

}  // namespace
}  // namespace annulus
