// Sharded attention on GPU ranks: every transport, schedule and implementation against the oracle,
// and what a steady state may not do. More ranks than GPUs share them, and then only copy engines
// carry data.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/oracle.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/setup_counter.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/comparison.hpp>
#include <annulus/verification/random_problem.hpp>
#include <annulus/verification/verification.hpp>

#include "tests/ring/device_attention_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using ::testing::HasSubstr;
using verification::ShardedCase;

TEST_F(DeviceAttention, RandomProblems) {
  for (const Transport transport : transports()) {
    for (int index = 0; index < 16; ++index) {
      const verification::RandomProblem drawn =
          verification::draw_problem(17, index, test::session().size());
      if (drawn.implementation == "vanilla") continue;  // of CPUs
      ShardedCase one;
      one.problem = drawn.problem;
      one.layout = drawn.layout;
      one.schedule = drawn.schedule;
      one.plan = drawn.plan;
      one.seed = drawn.seed;
      one.transport = transport;
      mesh_ = std::make_unique<Mesh>(drawn.mesh, test::session().world(), test::kWatchdog);
      SCOPED_TRACE(drawn.command);
      expect_verified(one);
    }
  }
}

TEST_F(DeviceAttention, EveryScheduleTransportAndImplementation) {
  const int ranks = test::session().size();
  const std::int64_t length = std::int64_t{256} * ranks;
  std::vector<std::int32_t> documents{0, 100, 101, static_cast<std::int32_t>(length)};
  const auto ids = segments_from_cu_seqlens(documents, length);
  for (const Transport transport : transports()) {
    for (const std::string schedule : {"ring", "allgather"}) {
      if (ranks == 1) continue;
      for (const std::string implementation : {"auto", "native"}) {
        for (int mask = 0; mask < 4; ++mask) {
          ShardedCase one = case_of(length, 8, 2, 64);
          one.transport = transport;
          one.schedule = schedule;
          one.implementation = implementation;
          one.problem.mask.set_causal(mask != 0);
          if (mask == 2) one.problem.mask.set_window(130, -1);
          if (mask == 3) one.problem.mask.set_segments(1, ids, ids);
          expect_verified(one);
        }
      }
      ShardedCase fused = case_of(length, 8, 2, 128);
      fused.transport = transport;
      fused.schedule = schedule;
      fused.implementation = "sdpa";
      expect_verified(fused);
      fused.problem.dtype = DType::float16;
      fused.problem.mask.set_causal(false);
      expect_verified(fused);
    }
  }
}

// cuDNN's gradients of blocks are rounded before they are added.
TEST_F(DeviceAttention, Gradients) {
  const std::int64_t length = std::int64_t{256} * test::session().size() + 21;
  // The oracle takes longest, and all transports and schedules have the same ten problems.
  using Truth = std::optional<OracleGradients>;
  std::vector<std::shared_ptr<Truth>> truths(10);
  for (auto& truth : truths) truth = std::make_shared<Truth>();
  for (const Transport transport : transports()) {
    for (const std::string& schedule :
         schedules({"ring", "double_ring", "allgather", "ulysses", "hybrid"})) {
      if (schedule == "double_ring" && test::session().size() % 2 != 0) continue;
      std::size_t problem = 0;
      const auto check = [&](ShardedCase one) {
        one.backward->truth = truths.at(problem++);
        one.transport = transport;
        if (schedule == "double_ring") {
          one.schedule = schedule;
          one.plan = PlanOptions::for_place(device().place());
          one.plan->inner_size = 2;
        }
        expect_verified(one);
      };
      for (const bool adds : {false, true}) {
        for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::zigzag}) {
          ShardedCase one = case_of(length, 8, 4, adds ? 64 : 128);
          one.layout.sequence = layout;
          const bool zigzag = layout == LayoutKind::zigzag;
          one.problem.dtype = adds == zigzag ? DType::float32 : DType::bfloat16;
          one.backward = {"flash_attn2", schedule, {.grad_lse = !adds, .adds = adds}};
          check(one);
        }
        for (const std::int64_t dim : {64, 128, 256}) {
          ShardedCase one = case_of(length, 8, dim == 64 ? 8 : 4, dim);
          one.problem.mask.set_causal(dim != 256);
          one.layout.sequence = adds ? LayoutKind::zigzag : LayoutKind::contiguous;
          one.implementation = "sdpa";
          one.backward = {"sdpa", schedule, {.adds = adds}};
          check(one);
        }
      }
    }
  }
}

// Results and gradients have the bits of a call for the whole problem. Chunks are multiples of the
// tiles of either head dimension.
TEST_F(DeviceAttention, TheSameBitsOnAnyNumberOfRanks) {
  const int ranks = test::session().size();
  for (const std::string& schedule : schedules({"allgather", "ulysses"})) {
    for (const std::int64_t dim : {64, 128}) {
      for (int mask = 0; mask < 3; ++mask) {
        ShardedCase one = case_of(std::int64_t{768} * ranks, 8, 4, dim);
        one.problem.reproducible = Reproducible::world;
        one.problem.mask.set_causal(mask != 0);
        if (mask == 2) one.problem.mask.set_window(300, -1);
        one.schedule = schedule;
        one.implementation = "flash_attn2";
        one.backward = {"flash_attn2", schedule};
        expect_verified(one);
      }
    }
  }
}

TEST_F(DeviceAttention, CudnnTakesNoGradientOfTheLse) {
  ShardedCase one = case_of(std::int64_t{256} * test::session().size(), 4, 2, 64);
  one.backward = {"sdpa", "auto", {.grad_lse = true}};
  EXPECT_THAT(test::message_of<UserError>([&] { expect_verified(one); }),
              HasSubstr("sdpa: it takes no gradient of the LSE"));
}

// A rank has more rows than threads add up at once.
TEST_F(DeviceAttention, GradientOfTheSinks) {
  const int ranks = test::session().size();
  for (const bool shared : {false, true}) {
    for (const bool adds : {false, true}) {
      ShardedCase one = case_of(std::int64_t{600} * ranks + 21, 4, 2, 64);
      one.problem.sinks = shared ? Sinks({2}, {0.5F, 1}) : Sinks::random(4, 3, 1);
      one.backward = {"auto", "auto", {.grad_lse = !adds, .adds = adds, .grad_sinks = true}};
      expect_verified(one);
    }
  }
}

// By the plain kernel and reductions that write maximum and sum, with sinks and rows without keys.
TEST_F(DeviceAttention, UnnormalisedOutputs) {
  const int ranks = test::session().size();
  for (const Transport transport : transports()) {
    for (const std::string& schedule : schedules()) {
      for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        for (const bool sinks : {false, true}) {
          ShardedCase one = case_of(std::int64_t{100} * ranks + 3, 4, 2, 40);
          one.problem.dtype = dtype;
          one.problem.normalize_output = false;
          one.problem.mask.set_offset(-5);
          if (sinks) one.problem.sinks = Sinks({4, 1}, {0, 1, -2, 5});
          one.transport = transport;
          one.schedule = schedule;
          expect_verified(one);
          // Folded as soon as there are two.
          one.plan.emplace().result_bytes = 1;
          expect_verified(one);
        }
      }
    }
  }
}

// Reductions add sinks to the results of any kernel: results that a kernel has rounded or that are
// already in the output, float64 LSEs, rows without keys, odd sizes.
TEST_F(DeviceAttention, Sinks) {
  const int ranks = test::session().size();
  const auto length = static_cast<std::int32_t>(256 * ranks);
  for (const Transport transport : transports()) {
    for (const std::string& schedule : schedules()) {
      for (const std::string implementation : {"sdpa", "flash_attn2", "native"}) {
        for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32}) {
          if (implementation == "sdpa" && dtype == DType::float32) continue;
          for (const std::int64_t dim : {64, 13}) {
            if (implementation != "native" && dim == 13) continue;
            ShardedCase one = case_of(length, 8, 2, dim);
            one.transport = transport;
            one.schedule = schedule;
            one.implementation = implementation;
            one.problem.dtype = dtype;
            one.problem.shape.batch = 2;
            one.problem.sinks = Sinks::random(8, 3, 1);
            expect_verified(one);
            one.problem.mask.set_kv_lengths({length / 3, 0});
            expect_verified(one);
          }
        }
      }
    }
  }
}

// The same entries drop as in the oracle, under every schedule and layout.
TEST_F(DeviceAttention, Dropout) {
  const int ranks = test::session().size();
  for (const std::string& schedule : schedules()) {
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
        ShardedCase one = case_of(std::int64_t{200} * ranks + 13, 4, 2, 64);
        one.transport = transports().front();
        one.schedule = schedule;
        one.layout.sequence = layout;
        one.problem.dtype = dtype;
        one.problem.dropout.emplace(0.3, 7);
        expect_verified(one);
        one.problem.sinks = Sinks::random(4, 1, 2);
        one.problem.soft_cap = 5;
        expect_verified(one);
      }
    }
  }
}

// Under any layout, keys of bias and mask are found by global position or, where they were sent
// with their rows, by column; by every kernel that honours them.
TEST_F(DeviceAttention, BiasAndDenseMask) {
  const int ranks = test::session().size();
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const std::string& schedule :
         schedules({"ring", "allgather", "ulysses", "hybrid", "pass_q"})) {
      for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
        const std::int64_t length = std::int64_t{200} * ranks + 13;
        ShardedCase one = case_of(length, 4, 2, 64);
        one.transport = transports().front();
        one.schedule = schedule;
        one.layout.sequence = layout;
        one.problem.dtype = dtype;
        one.problem.bias = Extents{1, 4, length, length};
        expect_verified(one);
        one.problem.dense_mask = Extents{1, 1, length, length};
        expect_verified(one);
        one.implementation = "native";
        expect_verified(one);
        one.implementation = "auto";
        one.problem.bias = Extents{1, 4, 1, length};
        one.problem.soft_cap = 5;
        expect_verified(one);
      }
    }
  }
}

// Default options give blocks that the fastest kernel takes.
TEST_F(DeviceAttention, DefaultOptionsSuitTheDevice) {
  for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::zigzag}) {
    ShardedCase one = case_of(std::int64_t{256} * test::session().size(), 8, 2, 128);
    one.layout.sequence = layout;
    const ShardedAttention attention(one.problem,
                                     shard_operands(one.problem, mesh_->shape(), one.layout),
                                     *mesh_, registry_, device(), {});
    EXPECT_EQ(attention.implementations(), "flash_attn2");
  }
}

TEST_F(DeviceAttention, PaddedBatchesStayWithCudnn) {
  const int ranks = test::session().size();
  const auto length = static_cast<std::int32_t>(384 * ranks);
  for (const Transport transport : transports()) {
    for (const std::string schedule : {"ring", "allgather"}) {
      for (const bool causal : {false, true}) {
        ShardedCase one = case_of(length, 8, 2, 128);
        one.transport = transport;
        one.schedule = ranks == 1 ? "local" : schedule;
        one.implementation = "sdpa";
        one.problem.shape.batch = 4;
        one.problem.mask.set_causal(causal);
        one.problem.mask.set_kv_lengths({length, length / 3, 1, 0});
        expect_verified(one);
        one.problem.mask.set_query_lengths({length / 2, length, 77, length});
        expect_verified(one);
      }
    }
  }
}

// A fold into float32, and rings by groups of heads.
TEST_F(DeviceAttention, LittleMemoryForPartialResults) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{200000}}) {
    ShardedCase one = case_of(std::int64_t{512} * test::session().size(), 8, 4, 64);
    one.plan = PlanOptions::for_place(device().place());
    one.plan->result_bytes = bytes;
    expect_verified(one);
  }
}

TEST_F(DeviceAttention, ReplayedCallsSeeNewDataAndSetNothingUp) {
  const auto length = static_cast<std::int32_t>(384 * test::session().size());
  for (const Transport transport : transports()) {
    for (const bool padded : {false, true}) {
      ShardedCase one = case_of(length, 8, 2, 128);
      one.transport = transport;
      if (padded) {
        one.problem.shape.batch = 2;
        one.problem.mask.set_kv_lengths({length, length / 3});
        one.problem.mask.set_query_lengths({length / 2, length});
      }
      CaseOnDevice call = on_device(one);
      const auto run = [&] {
        call.twins.upload();
        mesh_->world().barrier();  // nobody writes what another one still reads
        call.run();
        return call.bits();
      };
      const auto first = run();   // as it is
      const auto second = run();  // recorded
      EXPECT_TRUE(first == second);
      const std::uint64_t before = setup_count();
      EXPECT_TRUE(run() == first);
      transform(call.shards.value.view(), 0.5F, 1.0F);
      const auto other = run();
      EXPECT_FALSE(other == first);
      transform(call.shards.value.view(), 1.0F, -1.0F);
      const auto last = run();
      EXPECT_FALSE(last == other);
      EXPECT_EQ(setup_count(), before) << "a repeated call set something up";
      EXPECT_GE(call.attention.replays(), 4U);

      // Without replay the numbers are the same, to the bit.
      ShardedAttentionOptions options = options_of(one);
      options.runner.replay = false;
      ShardedAttention plain(one.problem, call.operands, *mesh_, registry_, device(), options);
      plain.run(call.twins.tensors());
      call.twins.download();
      EXPECT_TRUE(call.bits() == last);
    }
  }
}

// Head-major tensors, tensors whose strides are not multiples of 16 bytes, and tensors whose
// addresses are not, after contiguous tensors.
TEST_F(DeviceAttention, TensorsThatLieOtherwise) {
  ShardedCase one = case_of(std::int64_t{256} * test::session().size(), 8, 2, 64);
  CaseOnDevice call = on_device(one);
  call.twins.upload();
  mesh_->world().barrier();
  call.run();
  const auto values = [&] {
    const Tensor& output = call.shards.output;
    std::vector<float> result(static_cast<std::size_t>(output.shape().product()));
    to_float32(output.view().data(), one.problem.dtype, result.data(), output.shape().product());
    return result;
  };
  const std::vector<float> right = values();

  const auto stream = device().make_stream("copies", test::kWatchdog, nullptr);
  enum class Way { head_major, padded, shifted };
  for (const Way way : {Way::head_major, Way::padded, Way::shifted}) {
    std::vector<Tensor> owners;
    const auto like = [&](const ConstTensorView& tensor) {
      const Extents& s = tensor.shape();
      const std::int64_t pad = way == Way::head_major ? 0 : way == Way::padded ? 4 : 8;
      owners.emplace_back(tensor.dtype(), Extents{s[0], s[2], s[1], s[3] + pad}, device().memory());
      const TensorView view =
          owners.back().view().permute({0, 2, 1, 3}).slice(3, way == Way::shifted ? 1 : 0, s[3]);
      device().copy(tensor, view, *stream);
      return view;
    };
    const LocalTensors plain = call.twins.tensors();
    const LocalTensors other{like(plain.query), like(plain.key), like(plain.value),
                             like(plain.output), plain.lse};
    stream->synchronize();
    for (int round = 0; round < 2; ++round) {
      call.attention.prepare(other);
      for (int i = 0; i < 3; ++i) call.attention.run(other);
      device().copy(other.output, plain.output, *stream);
      stream->synchronize();
      call.twins.download();
      const std::vector<float> found = values();
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], right[i], 0.02 * std::max(1.0F, std::abs(right[i]))) << i;
      }
      call.attention.prepare(plain);
      call.attention.run(plain);
    }
  }
}

// Logits near −128, below the exponents that float32 has: and shards whose lengths are 64 more than
// a multiple of 128.
TEST_F(DeviceAttention, StronglyNegativeLse) {
  const int ranks = test::session().size();
  for (const bool causal : {true, false}) {
    ShardedCase one = case_of(std::int64_t{192} * ranks, 4, 2, 64);
    one.problem.mask.set_causal(causal);
    one.layout.sequence = LayoutKind::contiguous;
    one.seed = 3;
    CaseOnDevice call = on_device(one);
    const auto whole = [&](const NamedSharding& sharding, verification::Operand operand) {
      auto index = sharding.index(mesh_->rank());
      index[1] = PositionRanges::all(one.problem.shape.kv_length);
      return verification::random_part(index, sharding.global_shape(), one.problem.dtype, one.seed,
                                       operand, call.memory);
    };
    const Tensor key = whole(call.operands.key, verification::Operand::key);
    const Tensor value = whole(call.operands.value, verification::Operand::value);
    transform(call.shards.query.view(), 0.2F, 4.0F);
    transform(call.shards.key.view(), 0.2F, -4.0F);
    transform(key.view(), 0.2F, -4.0F);
    call.twins.upload();
    mesh_->world().barrier();
    call.run();
    const OracleOutput truth =
        oracle_attention(one.problem, call.shards.query.view(), key.view(), value.view(),
                         call.operands.query.positions(mesh_->rank(), 1), 0, 0);
    EXPECT_LT(*std::max_element(truth.lse.begin(), truth.lse.end()), -100);
    const verification::Accuracy found =
        verification::accuracy(verification::compare(one.problem, truth, call.shards.output.view(),
                                                     call.shards.lse.view()),
                               mesh_->world());
    EXPECT_TRUE(found.within(accuracy_bound(one.problem)))
        << found.output << ' ' << found.row_share << ' ' << found.lse_share;
  }
}

}  // namespace
}  // namespace annulus::ring
