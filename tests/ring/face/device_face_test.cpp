// The public interface on GPU ranks: the caller's stream, many objects in turn, and the cost of a
// call and of another object.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cuda_runtime_api.h>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/annulus.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>

#include "tests/ring/face/device_face_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::HasSubstr;

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

// A call starts after earlier work on its stream, later work there starts after the call, and the
// host waits for neither.
TEST_F(DeviceFace, ACallHasItsPlaceInTheCallersStream) {
  const AttentionOptions options = causal();
  Layer layer(*context_, options, 3);
  for (int call = 0; call < 4; ++call) {  // prepared, recorded, replayed
    layer.spoil(stream_);
    context_->mesh().world().barrier();
    delay(stream_);
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
  AttentionOptions options = causal_ring();
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
  expect_turns(first, second, 20, options.mask);
}

// Memory that a call under way still uses does not go to the next object.
TEST_F(DeviceFace, ObjectsMayEndWhileTheirCallsAreUnderWay) {
  const AttentionOptions options = causal();
  Layer first(*context_, options, 1);
  Layer second(*context_, options, 5);
  first.upload(stream_);
  second.upload(stream_);
  for (int round = 0; round < 5; ++round) {
    for (Layer* layer : {&first, &second}) {
      layer->spoil(stream_);
      delay(stream_);
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
  AttentionOptions options = causal_ring();
  Layer other(*context_, options, 3, stream_);
  other.run(stream_);
  other.expect_right(stream_, options.mask);
  other.spoil(stream_);
  Layer next(*context_, options, 7, stream_);
  const auto leave = [&] {
    Attention ended(*context_, options);
    next.run(ended, stream_);
    next.expect_right(stream_, options.mask);
    context_->mesh().world().barrier();
    if (test::session().rank() == 0) {
      for (int i = 0; i < 10; ++i) {
        delay(stream_);
      }
    }
    other.run(stream_);
    throw std::runtime_error("the caller's own");
  };
  EXPECT_THROW(leave(), std::runtime_error);
  other.expect_right(stream_, options.mask);
  for (int call = 0; call < 3; ++call) {
    other.expect_right_call(stream_, options.mask);
  }
  next.run(stream_);
  next.expect_right(stream_, options.mask);
}

// Tensors with other strides, one call right after the other.
TEST_F(DeviceFace, TensorsMayLieOtherwiseWhileCallsAreUnderWay) {
  const AttentionOptions options = causal();
  Layer layer(*context_, options, 4, stream_);
  for (int round = 0; round < 4; ++round) {
    layer.spoil(stream_);
    delay(stream_);
    layer.run(stream_);
    layer.run_with_zero_queries_head_major(stream_);
    layer.expect_right(stream_, options.mask);
  }
}

TEST_F(DeviceFace, MasksAreReplacedFromCallToCall) {
  AttentionOptions options = causal();
  Layer layer(*context_, options, 2, stream_);
  for (const std::int32_t length : {700, 1536, 1}) {
    Mask mask;
    mask.set_causal(true);
    mask.set_kv_lengths({length});
    const auto begin = Clock::now();
    layer.attention.set_mask(mask);
    std::printf("mask replaced in %.2f ms\n", milliseconds_since(begin));
    for (int call = 0; call < 3; ++call) {
      layer.expect_right_call(stream_, mask);
    }
  }
}

// The stream still reads a result when it is dropped; a call on another stream must not get its
// memory.
TEST_F(DeviceFace, ResultsMayBeDroppedWhileTheirStreamStillReadsThem) {
  AttentionOptions options = causal();
  Layer first(*context_, options, 3);
  Layer second(*context_, options, 7);
  const cudaStream_t other = make_stream();
  first.upload(stream_);
  second.upload(other);
  first.run(stream_);
  second.run(other);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int round = 0; round < 4; ++round) {
    first.spoil(stream_);
    {
      const AttentionOutput result = first.compute(stream_);
      delay(stream_);
      first.copy_output(result, stream_);
    }
    { const AttentionOutput result = second.compute(other); }
    check_cuda(cudaStreamSynchronize(other), "cudaStreamSynchronize");
    first.expect_right(stream_, options.mask);
  }
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
  expect_turns(first, second, 10, options.mask);
}

// The gradients of flash need a workspace; buffers are shared too.
TEST_F(DeviceFace, ManyObjectsOfOneShapeTakeTheMemoryOfOne) {
  AttentionOptions options = causal();
  options.implementation = "flash_attn2";
  const auto in_use = [&] { return context_->device().memory().statistics().in_use; };
  const auto add_layer = [&](std::vector<std::unique_ptr<Attention>>& layers) {
    const std::size_t before = in_use();
    layers.push_back(std::make_unique<Attention>(*context_, options));
    layers.back()->prepare_backward({});
    return in_use() - before;
  };
  std::vector<std::unique_ptr<Attention>> layers;
  const std::size_t first = add_layer(layers);
  std::size_t others = 0;
  for (int i = 1; i < 16; ++i) others += add_layer(layers);
  // Work lists and the like are each object's own.
  EXPECT_LT(others, 15 * first / 4) << "the first takes " << first << " bytes";
}

// Times that users notice: another object of a known shape, and a replayed call.
// The calling thread's processor time. On a busy machine, elapsed time includes the work of others.
double processor_milliseconds() {
  timespec now{};
  EXPECT_EQ(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

// The cheapest of many objects counts, since a collective call may spin until other ranks have
// come. On a busy machine, most do.
TEST_F(DeviceFace, ObjectsAndCallsAreCheap) {
  for (const std::string implementation : {"sdpa", "flash_attn2"}) {
    AttentionOptions options = causal();
    options.implementation = implementation;
    if (!context_->registry().get(implementation).available(context_->place())) continue;
    std::vector<double> prepared;
    for (int i = 0; i < 31; ++i) {
      context_->mesh().world().barrier();
      const double begin = processor_milliseconds();
      const Attention attention(*context_, options);
      prepared.push_back(processor_milliseconds() - begin);
    }
    const auto layer = std::make_unique<Layer>(*context_, options, 1);
    layer->upload(stream_);
    std::vector<double> enqueued;
    for (int call = 0; call < 200; ++call) {
      const auto begin = Clock::now();
      layer->run(stream_);
      if (call >= 10) enqueued.push_back(milliseconds_since(begin));
      if (call % 10 == 9) check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }
    layer->expect_right(stream_, options.mask);
    std::sort(enqueued.begin(), enqueued.end());
    const double again = *std::min_element(prepared.begin() + 1, prepared.end());
    const double call = enqueued[enqueued.size() / 2];
    std::printf(
        "%s: first object %.2f ms of processor time, another %.2f, a call enqueued in %.1f us\n",
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
    Layer layer(context, options, 2, stream_);
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
    // The time to notice the lost rank begins inside run(), which can take long on a busy machine.
    const auto begin = Clock::now();
    layer.run(stream_);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_GE(milliseconds_since(begin), 2500);
    EXPECT_LT(milliseconds_since(begin), 20000);
    const std::string message = test::message_of<TimeoutError>([&] { layer.attention.wait(); });
    EXPECT_THAT(message, HasSubstr("step "));
    EXPECT_THAT(message, HasSubstr("rank 1"));
    EXPECT_THROW(layer.run(stream_), TimeoutError);
  }
}

// The rows of an array, by rank, which the body copies from shards that hold all of them.
class DeviceArrays : public DeviceFace {
 protected:
  static constexpr std::int64_t kRows = 1 << 16;

  void SetUp() override {
    DeviceFace::SetUp();
    if (IsSkipped()) return;
    sharding_.emplace(context_->mesh_shape(), PartitionSpec::parse("sp"),
                      Extents{kRows * context_->size()});
    map_ = {.body =
                [this](std::span<const ConstTensorView> shards) {
                  std::vector<Tensor> results;
                  results.emplace_back(DType::int32, shards[0].shape(), context_->memory());
                  // Late, so that a moved shard that ended with the call would be lost.
                  delay(stream_);
                  check_cuda(cudaMemcpyAsync(results[0].view().data(), shards[0].data(),
                                             results[0].bytes(), cudaMemcpyDeviceToDevice, stream_),
                             "cudaMemcpyAsync");
                  return results;
                },
            .in_specs = {PartitionSpec()},
            .out_specs = {PartitionSpec()},
            .check_replication = false};
  }

  // True if all bytes of device memory are `byte`, after earlier work of the stream.
  [[nodiscard]] bool holds(const ConstTensorView& view, int byte) const {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(view.elements()) * 4);
    check_cuda(
        cudaMemcpyAsync(bytes.data(), view.data(), bytes.size(), cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return std::ranges::all_of(bytes, [&](unsigned char one) { return one == byte; });
  }

  std::optional<NamedSharding> sharding_;
  ShardMap map_;
};

TEST_F(DeviceArrays, AreReadAfterTheCallersEarlierWork) {
  ShardedTensor array(*sharding_, context_->rank(), DType::int32, context_->memory());
  const std::size_t bytes = kRows * sizeof(std::int32_t);
  for (const int byte : {1, 2, 3}) {
    delay(stream_);
    check_cuda(cudaMemsetAsync(array.local().data(), byte, bytes, stream_), "cudaMemsetAsync");
    const auto results = shard_map(*context_, map_, {array}, stream_);
    // The body's work has ended, so that memory of moved shards may go to others.
    EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
    EXPECT_TRUE(holds(results[0].local(), byte));

    const Tensor whole(DType::int32, results[0].global_shape(), context_->memory());
    delay(stream_);
    check_cuda(cudaMemsetAsync(array.local().data(), byte + 8, bytes, stream_), "cudaMemsetAsync");
    reshard(*context_, *sharding_, array.local(), results[0].sharding(), whole.view(), stream_);
    EXPECT_TRUE(holds(whole.view(), byte + 8));
  }
}

TEST_F(DeviceArrays, ABodyThatThrowsIsWaitedForToo) {
  const ShardedTensor array(*sharding_, context_->rank(), DType::int32, context_->memory());
  const ShardBody copy = map_.body;
  map_.body = [&](std::span<const ConstTensorView> shards) -> std::vector<Tensor> {
    std::vector<Tensor> results = copy(shards);
    if (context_->rank() == 0) throw ArgumentError("body", "rank 0", "another");
    return results;
  };
  EXPECT_THROW((void)shard_map(*context_, map_, {array}, stream_), UserError);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
}

// On every rank, although one stream alone is captured.
TEST_F(DeviceArrays, ACapturedStreamIsRefused) {
  const ShardedTensor array(*sharding_, context_->rank(), DType::int32, context_->memory());
  const Tensor other(DType::int32, {kRows}, context_->memory());
  const bool last = context_->rank() == context_->size() - 1;
  if (last) {
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "begin of capture");
  }
  EXPECT_THAT(
      test::message_of<UserError>([&] { (void)shard_map(*context_, map_, {array}, stream_); }),
      HasSubstr("shard_map cannot be captured"));
  EXPECT_THAT(test::message_of<UserError>([&] {
                reshard(*context_, *sharding_, array.local(), *sharding_, other.view(), stream_);
              }),
              HasSubstr("reshard cannot be captured"));
  if (last) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &graph), "end of capture");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  EXPECT_NO_THROW((void)shard_map(*context_, map_, {array}, stream_));
}

}  // namespace
}  // namespace annulus
