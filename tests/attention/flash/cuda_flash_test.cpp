// The flash kernel, beside the suite that every implementation has to pass (tests/attention/suite):
// comparisons with the oracle, and refusals.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <annulus/core/error.hpp>

#include "flash/flash_attention.hpp"
#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

class CudaFlash : public CudaFlashTest {
 protected:
  CudaFlash() : CudaFlashTest("flash_attn2") {}
};

// The blocks of one launch take work while the last ones of the other still do.
TEST_F(CudaFlash, RunsOnTwoStreamsAtOnce) {
  Random random(80);
  AttentionProblem problem = causal_half_problem({2, 1500, 1500, 16, 16, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  Mirrors operands(*device_, *stream_);
  const AttentionBlock block = upload_operands(operands, whole.block());
  flash::FlashAttention flash(problem, *device_);
  const auto second_stream = device_->make_stream("second", kWatchdog, nullptr);
  const auto run = [&](Stream& first, Stream& second, int rounds) {
    std::array<Result, 2> results{Result(whole.block()), Result(whole.block())};
    Mirrors mirrors(*device_, *stream_);
    std::vector<SoftmaxState> states;
    for (const Result& result : results) {
      states.push_back({mirrors.result(result.output.view()), mirrors.result(result.lse.view())});
    }
    stream_->synchronize();
    for (int round = 0; round < rounds; ++round) {
      flash.run(block, states[0], first);
      flash.run(block, states[1], second);
    }
    first.synchronize();
    second.synchronize();
    mirrors.download();
    std::vector<float> all;
    for (const Result& result : results) {
      const TensorView output = result.output.view();
      all.insert(all.end(), output.as<float>(), output.as<float>() + output.elements());
    }
    return all;
  };
  const std::vector<float> expected = run(*stream_, *stream_, 1);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(run(*stream_, *second_stream, 1) == expected) << i;
    ASSERT_TRUE(run(*stream_, *second_stream, 8) == expected) << i;
  }
}

// Large logits have large rounding errors of their own, in LSE and, in float32, in weights.
TEST_F(CudaFlash, HugeAndTinyLogits) {
  Random random(85);
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    const bool wide = dtype == DType::float32;
    for (const double scale : {-3.0, 0.0, 1e-4, 3.0, 30.0}) {
      if (!wide && scale <= 0) continue;
      for (const std::int64_t dim : {64, 128}) {
        AttentionProblem problem = half_problem({1, 260, 260, 2, 2, dim, dim}, dtype);
        problem.scale = scale;
        problem.mask.set_causal(true);
        const WholeAttention whole = random_attention(random, problem);
        const Result result = run_on_device(implementation(), whole, *device_, *stream_);
        const Error error = error_of(result, dtype, whole.oracle());
        const double size = std::abs(scale);
        EXPECT_LE(error.output, accuracy_bound(dtype, 260).output * (wide ? 1 + size : 1)) << scale;
        EXPECT_LE(error.lse, wide ? 1e-5 + 1e-4 * size : 2e-3 * std::max(1.0, scale)) << scale;
      }
    }
  }
}

// Until a row sees a key, its running maximum is that of no value. The factor for a maximum that
// stays must be 1 there too, whatever the scale.
TEST_F(CudaFlash, RowsThatSeeNothingAtFirst) {
  Random random(91);
  for (const double scale : {0.088, 0.7123, 0.93, 1.37, 1.61, 2.9, 7.3, 93.5033}) {
    for (const bool capped : {false, true}) {
      AttentionProblem problem = half_problem({1, 256, 512, 2, 2, 64, 64});
      if (capped) {
        problem.soft_cap = scale;
      } else {
        problem.scale = scale;
      }
      problem.mask.set_causal(true);
      problem.mask.set_offset(64);
      const WholeAttention whole = random_attention(random, problem);
      const Result result = run_on_device(implementation(), whole, *device_, *stream_);
      EXPECT_LE(error_of(result, problem.dtype, whole.oracle()).output,
                accuracy_bound(problem.dtype, 512).output)
          << scale << (capped ? " capped" : "");
    }
  }
}

// The rounding error of a large maximum must not count again with every tile.
TEST_F(CudaFlash, EqualLogitsWeighTheSameInAllTiles) {
  constexpr std::int64_t kKeys = 4096;
  constexpr std::int64_t kDim = 64;
  for (const double scale : {100.7, 311.7, 500.3, 611.1, 777.7}) {
    AttentionProblem problem = half_problem({1, 128, kKeys, 1, 1, kDim, kDim}, DType::bfloat16);
    problem.scale = scale;
    std::vector<float> values(kKeys * kDim, 0.0F);
    std::fill(values.begin() + kKeys / 2 * kDim, values.end(), 1.0F);
    const WholeAttention whole = attention_of(problem, std::vector<float>(128 * kDim, 1.0F),
                                              std::vector<float>(kKeys * kDim, 1.0F), values);
    const Result result = run_on_device(implementation(), whole, *device_, *stream_);
    EXPECT_NEAR(result.output.view().as<float>()[0], 0.5F, 1e-3F) << scale;
  }
}

// Tiles whose maxima differ are weighed against each other, up to the largest logits of
// docs/semantics.md §1.
TEST_F(CudaFlash, TilesOfLargeLogitsAreWeighedExactly) {
  constexpr std::int64_t kRows = 128;
  constexpr std::int64_t kKeys = 256;
  constexpr std::int64_t kDim = 64;
  // Three summands of a logit that bfloat16 holds.
  const std::vector<std::vector<float>> logits{{8192, 1792, 16}, {983040, 16384, 576}};
  for (const std::vector<float>& parts : logits) {
    for (const bool rising : {false, true}) {
      AttentionProblem problem = half_problem({1, kRows, kKeys, 1, 1, kDim, kDim}, DType::bfloat16);
      problem.scale = 1.0;
      std::vector<float> keys(kKeys * kDim, 0.0F);
      std::vector<float> values(kKeys * kDim);
      for (std::int64_t j = 0; j < kKeys; ++j) {
        std::copy(parts.begin(), parts.end(), keys.begin() + j * kDim);
        const bool larger = (j >= kKeys / 2) == rising;
        if (larger) keys[static_cast<std::size_t>(j * kDim + 3)] = 1;
        std::fill_n(values.begin() + j * kDim, kDim, larger ? 1.0F : -1.0F);
      }
      const WholeAttention whole =
          attention_of(problem, std::vector<float>(kRows * kDim, 1.0F), keys, values);
      const Error error = error_of(run_on_device(implementation(), whole, *device_, *stream_),
                                   problem.dtype, whole.oracle());
      EXPECT_LE(error.output, accuracy_bound(problem.dtype, kKeys).output) << parts[0];
      EXPECT_LE(error.lse, 0.5e-6 * parts[0]) << parts[0];
    }
  }
}

// Any cap, from the smallest to one that changes nothing, with logits below it and above.
TEST_F(CudaFlash, ExtremeSoftCaps) {
  Random random(186);
  int i = 0;
  for (const double cap :
       {1.2e-38, 1e-20, 1e-9, 1e-3, 150.0, 200.0, 300.0, 3000.0, 1e5, 3e6, 1e8, 1e10, 1e30, 3e38}) {
    for (const double scale : {0.088, 0.9, 3.0}) {
      const std::int64_t dim = i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 256;
      AttentionProblem problem = half_problem({1, 300, 300, 4, 2, dim, dim},
                                              i % 2 == 0 ? DType::bfloat16 : DType::float16);
      ++i;
      problem.soft_cap = cap;
      problem.scale = scale;
      problem.mask.set_causal(true);
      for (const bool general : {false, true}) {
        if (general) problem.bias = Extents{1, 1, 300, 300};
        const WholeAttention whole = random_attention(random, problem);
        const OracleOutput truth = whole.oracle();
        const Error error = error_of(run_on_device(implementation(), whole, *device_, *stream_),
                                     problem.dtype, truth);
        SCOPED_TRACE(fmt::format("cap {} scale {} {}", cap, scale, to_string(problem.shape)));
        EXPECT_LE(error.output, accuracy_bound(problem.dtype, 300).output);
        // The rounding of float32 sums of large products comes on top.
        const double size = scale * 1.5 * static_cast<double>(dim);
        EXPECT_LE(error.lse, 2e-3 + std::sqrt(static_cast<double>(dim)) * 0x1p-24 * size);
      }
    }
  }
}

// Columns that have not arrived yet hold NaN.
TEST_F(CudaFlash, AwaitsColumnsThatArriveLate) {
  Random random(98);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem =
        half_problem({1, 1000, 1000, 64, 2, dim, dim});  // more tiles than multiprocessors
    problem.mask.set_window(700, 300);
    const WholeAttention whole = random_attention(random, problem);
    const Result expected = run_on_device(implementation(), whole, *device_, *stream_);

    Mirrors mirrors(*device_, *stream_);
    const Tensor key(problem.dtype, whole.key.shape(), device_->memory());
    const Tensor value(problem.dtype, whole.value.shape(), device_->memory());
    Tensor host_number(DType::int32, {1}, test_memory());
    *host_number.view().as<std::int32_t>() = 1000;
    const TensorView number = mirrors.upload(host_number.view());
    for (const Tensor* tensor : {&key, &value}) {
      check_cuda(cudaMemset(tensor->view().data(), 0xff, tensor->bytes()), "cudaMemset");
    }
    const Result result(whole.block());
    const SoftmaxState there{mirrors.result(result.output.view()),
                             mirrors.result(result.lse.view())};
    AttentionBlock block = whole.block();
    block.query = mirrors.upload(block.query);
    check_cuda(cudaDeviceSynchronize(), "uploads");

    block.key = key.view();
    block.value = value.view();
    block.arrived_from = number.as<std::int32_t>();
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    kernel->prepare(block, there);
    kernel->forward(block, there, {*stream_, nullptr, 1});
    const std::shared_ptr<Event> done = stream_->record();
    const auto copies = device_->make_stream("copies", kWatchdog, nullptr);
    for (std::int32_t behind = 1000; behind > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_FALSE(done->is_complete()) << "with columns from " << behind << " on";
      const std::int32_t from = std::max(0, behind - 270);
      for (const auto& [source, target] :
           {std::pair(&whole.key, &key), std::pair(&whole.value, &value)}) {
        const std::size_t token = source->bytes() / 1000;
        const auto offset = static_cast<std::size_t>(from) * token;
        check_cuda(cudaMemcpyAsync(static_cast<std::byte*>(target->view().data()) + offset,
                                   static_cast<const std::byte*>(source->view().data()) + offset,
                                   static_cast<std::size_t>(behind - from) * token,
                                   cudaMemcpyHostToDevice, CudaStream::of(*copies).raw()),
                   "cudaMemcpyAsync");
      }
      copies->synchronize();
      *host_number.view().as<std::int32_t>() = from;
      device_->copy(host_number.view(), number, *copies);
      copies->synchronize();
      behind = from;
    }
    mirrors.download();
    EXPECT_TRUE(result == expected);
  }
}

// Rows that see six keys, in one call and in four calls that each continue the last.
TEST_F(CudaFlash, StatesOfFewKeys) {
  Random random(99);
  AttentionProblem problem = half_problem({1, 512, 512, 16, 1, 64, 64}, DType::float16);
  problem.mask.set_window(5, 0);
  const WholeAttention whole = random_attention(random, problem);
  const OracleOutput truth = whole.oracle();
  const double once =
      error_of(run_on_device(implementation(), whole, *device_, *stream_), problem.dtype, truth)
          .output;
  const Result result(whole.block());
  flash::FlashAttention attention(problem, *device_);
  for (std::int64_t first = 0; first < 4; ++first) {
    const PositionRanges columns({PositionRange{GlobalPosition(first), 128, 4}});
    const Tensor keys = gather(whole.key.view(), columns);
    const Tensor values = gather(whole.value.view(), columns);
    AttentionBlock block{whole.query.view(), as_bthd(keys), as_bthd(values), whole.rows(), columns};
    if (first > 0) block.state = result.state();
    compute_on(*device_, *stream_, block, result.state(),
               [&](const AttentionBlock& there, const SoftmaxState& state) {
                 attention.run(there, state, *stream_);
               });
  }
  EXPECT_LE(error_of(result, problem.dtype, truth).output, 1.05 * once);
}

TEST_F(CudaFlash, RefusesProblemsThatItCannotCompute) {
  const auto reason = [&](const AttentionShape& shape, DType dtype = DType::bfloat16) {
    return implementation().capability(half_problem(shape, dtype), device_->place()).reason();
  };
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 64, 64}, DType::float64), HasSubstr("float64"));
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 60, 64}), HasSubstr("60 with 64"));
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 64, 264}), HasSubstr("64 with 264"));
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 62, 64}, DType::float32), HasSubstr("62 with 64"));
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 64, 260}, DType::float32), HasSubstr("64 with 260"));
  EXPECT_THAT(reason({1, 8, std::int64_t{1} << 29, 1, 1, 64, 64}), HasSubstr("positions"));
  AttentionProblem problem = half_problem({1, 8, 8, 1, 1, 64, 64});
  problem.scale = -1.0;
  EXPECT_THAT(implementation().capability(problem, device_->place()).reason(), HasSubstr("scale"));
  EXPECT_THAT(implementation().capability(problem, Place::host()).reason(), HasSubstr("CPU"));
}

TEST_F(CudaFlash, RefusesLayoutsThatItsCopiesCannotRead) {
  Random random(91);
  for (const DType dtype : {DType::bfloat16, DType::float32}) {
    const AttentionProblem problem = half_problem({1, 8, 8, 1, 1, 64, 64}, dtype);
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    const WholeAttention whole = random_attention(random, problem);
    const Result result(whole.block());
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    const auto refusal = [&](const AttentionBlock& block) {
      return message_of<UnsupportedError>([&] { kernel->prepare(block, result.state()); });
    };
    AttentionBlock block = whole.block();
    const std::int64_t step = 64 + 8 / bytes;  // no multiple of 16 bytes
    block.key =
        ConstTensorView(block.key.data(), dtype, {1, 8, 1, 64}, Extents{8 * step, step, step, 1});
    EXPECT_THAT(refusal(block), HasSubstr("key has strides"));
    block = whole.block();
    block.value = ConstTensorView(static_cast<const std::byte*>(block.value.data()) + bytes, dtype,
                                  block.value.shape());
    EXPECT_THAT(refusal(block), HasSubstr("value does not begin"));
  }
}

}  // namespace
}  // namespace annulus::test
