// The flash kernel against the oracle, what it must not see, and what it refuses.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <annulus/core/error.hpp>

#include "flash/flash_attention.hpp"
#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/non_finite.hpp"
#include "tests/attention/wide_range.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class CudaFlash : public CudaFlashTest {
 protected:
  CudaFlash() : CudaFlashTest("flash_attn2") {}
};

TEST_F(CudaFlash, EveryMaskAloneAndInPairs) {
  Random random(81);
  const std::int64_t dims[] = {64, 128, 256};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    const std::int64_t dim = dims[i % 3];
    AttentionProblem problem =
        problem_of({2, 331, 493, 4, 2, dim, dim}, i % 2 == 0 ? DType::bfloat16 : DType::float16);
    problem.mask = random_mask(random, kinds, 2, 331, 493);
    if (i++ % 5 == 0) problem.soft_cap = 3.0;
    expect_whole_accurate(random_attention(random, problem));
  }
}

// The blocks of one launch take work while the last ones of the other still do.
TEST_F(CudaFlash, RunsOnTwoStreamsAtOnce) {
  Random random(80);
  AttentionProblem problem = problem_of({2, 1500, 1500, 16, 16, 64, 64});
  problem.mask.set_causal(true);
  const WholeAttention whole = random_attention(random, problem);
  const Mirror query(whole.query, *device_);
  const Mirror key(whole.key, *device_);
  const Mirror value(whole.value, *device_);
  const AttentionBlock block{query.view(), key.view(), value.view(), whole.rows(), whole.columns()};
  flash::FlashAttention flash(problem, *device_);
  const auto second_stream = device_->make_stream("second", kWatchdog, nullptr);
  const auto run = [&](Stream& first, Stream& second, int rounds) {
    std::array<Result, 2> results{Result(whole.block()), Result(whole.block())};
    std::vector<Mirror> mirrors;
    for (Result& result : results) {
      mirrors.emplace_back(result.output, *device_);
      mirrors.emplace_back(result.lse, *device_);
    }
    for (int round = 0; round < rounds; ++round) {
      flash.run(block, {mirrors[0].view(), mirrors[1].view()}, first);
      flash.run(block, {mirrors[2].view(), mirrors[3].view()}, second);
    }
    first.synchronize();
    second.synchronize();
    std::vector<float> all;
    for (std::size_t i = 0; i < 2; ++i) {
      mirrors[2 * i].download();
      const TensorView output = results[i].output.view();
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

TEST_F(CudaFlash, HeadDimensions) {
  Random random(82);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    expect_dimensions_accurate(random, dtype, {{8, 40}, {160, 104}});
  }
}

TEST_F(CudaFlash, EdgesOfTiles) {
  Random random(83);
  expect_edges_accurate(
      random, DType::bfloat16,
      {{1, 1}, {1, 300}, {300, 1}, {64, 80}, {127, 129}, {128, 128}, {193, 257}, {384, 384}});
}

TEST_F(CudaFlash, GroupedHeadsAndManyItems) {
  Random random(84);
  expect_grouped_heads_accurate(random, DType::bfloat16);
}

TEST_F(CudaFlash, HugeAndTinyLogits) {
  Random random(85);
  for (const double scale : {1e-4, 3.0, 30.0}) {
    for (const std::int64_t dim : {64, 128}) {
      AttentionProblem problem = problem_of({1, 260, 260, 2, 2, dim, dim});
      problem.scale = scale;
      problem.mask.set_causal(true);
      // Large logits have large errors of their own in LSE; their weights are compared.
      const WholeAttention whole = random_attention(random, problem);
      const Result result = run_on_device(implementation(), whole, *device_, *stream_);
      const Error error = error_of(result, problem.dtype, whole.oracle());
      EXPECT_LE(error.output, accuracy_bound(problem.dtype, 260).output) << scale;
      EXPECT_LE(error.lse, 2e-3 * std::max(1.0, scale)) << scale;
    }
  }
}

// Until a row sees a key, its running maximum is that of no value. The factor for a maximum that
// stays must be 1 there too, whatever the scale.
TEST_F(CudaFlash, RowsThatSeeNothingAtFirst) {
  Random random(91);
  for (const double scale : {0.088, 0.7123, 0.93, 1.37, 1.61, 2.9, 7.3, 93.5033}) {
    for (const bool capped : {false, true}) {
      AttentionProblem problem = problem_of({1, 256, 512, 2, 2, 64, 64});
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
    AttentionProblem problem = problem_of({1, 128, kKeys, 1, 1, kDim, kDim}, DType::bfloat16);
    problem.scale = scale;
    std::vector<float> values(kKeys * kDim, 0.0F);
    std::fill(values.begin() + kKeys / 2 * kDim, values.end(), 1.0F);
    const WholeAttention whole{
        problem, tensor_of(problem.dtype, {1, 128, 1, kDim}, std::vector<float>(128 * kDim, 1.0F)),
        tensor_of(problem.dtype, {1, kKeys, 1, kDim}, std::vector<float>(kKeys * kDim, 1.0F)),
        tensor_of(problem.dtype, {1, kKeys, 1, kDim}, values)};
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
      AttentionProblem problem = problem_of({1, kRows, kKeys, 1, 1, kDim, kDim}, DType::bfloat16);
      problem.scale = 1.0;
      std::vector<float> keys(kKeys * kDim, 0.0F);
      std::vector<float> values(kKeys * kDim);
      for (std::int64_t j = 0; j < kKeys; ++j) {
        std::copy(parts.begin(), parts.end(), keys.begin() + j * kDim);
        const bool larger = (j >= kKeys / 2) == rising;
        if (larger) keys[static_cast<std::size_t>(j * kDim + 3)] = 1;
        std::fill_n(values.begin() + j * kDim, kDim, larger ? 1.0F : -1.0F);
      }
      const WholeAttention whole{
          problem,
          tensor_of(problem.dtype, {1, kRows, 1, kDim}, std::vector<float>(kRows * kDim, 1.0F)),
          tensor_of(problem.dtype, {1, kKeys, 1, kDim}, keys),
          tensor_of(problem.dtype, {1, kKeys, 1, kDim}, values)};
      const Error error = error_of(run_on_device(implementation(), whole, *device_, *stream_),
                                   problem.dtype, whole.oracle());
      EXPECT_LE(error.output, accuracy_bound(problem.dtype, kKeys).output) << parts[0];
      EXPECT_LE(error.lse, 0.5e-6 * parts[0]) << parts[0];
    }
  }
}

// Below and above the logits for which it does without exponentials.
TEST_F(CudaFlash, SoftCaps) {
  Random random(86);
  for (const double cap : {0.5, 5.0, 50.0}) {
    for (const double scale : {-0.1, 0.1, 1.0}) {
      AttentionProblem problem = problem_of({1, 260, 390, 4, 2, 128, 128}, DType::float16);
      problem.soft_cap = cap;
      problem.scale = scale;
      problem.mask.set_window(100, 200);
      expect_whole_accurate(random_attention(random, problem));
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
      AttentionProblem problem =
          problem_of({1, 300, 300, 4, 2, dim, dim}, i % 2 == 0 ? DType::bfloat16 : DType::float16);
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
        problem_of({1, 1000, 1000, 64, 2, dim, dim});  // more tiles than multiprocessors
    problem.mask.set_window(700, 300);
    const WholeAttention whole = random_attention(random, problem);
    const Result expected = run_on_device(implementation(), whole, *device_, *stream_);

    const Mirror query(whole.query, *device_);
    const Tensor key(problem.dtype, whole.key.shape(), device_->memory());
    const Tensor value(problem.dtype, whole.value.shape(), device_->memory());
    Tensor host_number(DType::int32, {1}, test_memory());
    *host_number.view().as<std::int32_t>() = 1000;
    const Mirror number(host_number, *device_);
    for (const Tensor* tensor : {&key, &value}) {
      check_cuda(cudaMemset(tensor->view().data(), 0xff, tensor->bytes()), "cudaMemset");
    }
    const Result result(whole.block(), DType::float32);
    const Mirror output(result.output, *device_);
    const Mirror lse(result.lse, *device_);
    check_cuda(cudaDeviceSynchronize(), "uploads");

    AttentionBlock block = whole.block();
    block.query = query.view();
    block.key = key.view();
    block.value = value.view();
    block.arrived_from = number.view().as<std::int32_t>();
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    kernel->prepare(block, {output.view(), lse.view()});
    kernel->forward(block, {output.view(), lse.view()}, {*stream_, nullptr, 1});
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
      device_->copy(host_number.view(), number.view(), *copies);
      copies->synchronize();
      behind = from;
    }
    stream_->synchronize();
    output.download();
    lse.download();
    EXPECT_EQ(std::memcmp(result.output.view().data(), expected.output.view().data(),
                          result.output.bytes()),
              0);
    EXPECT_EQ(std::memcmp(result.lse.view().data(), expected.lse.view().data(), result.lse.bytes()),
              0);
  }
}

// Rows that see six keys, in one call and in four calls that each continue the last.
TEST_F(CudaFlash, StatesOfFewKeys) {
  Random random(99);
  AttentionProblem problem = problem_of({1, 512, 512, 16, 1, 64, 64}, DType::float16);
  problem.mask.set_window(5, 0);
  const WholeAttention whole = random_attention(random, problem);
  const OracleOutput truth = whole.oracle();
  const double once =
      error_of(run_on_device(implementation(), whole, *device_, *stream_), problem.dtype, truth)
          .output;
  const Mirror query(whole.query, *device_);
  Result result(whole.block(), DType::float32);
  const Mirror output(result.output, *device_);
  const Mirror lse(result.lse, *device_);
  const SoftmaxState state{output.view(), lse.view()};
  flash::FlashAttention attention(problem, *device_);
  for (std::int64_t first = 0; first < 4; ++first) {
    const PositionRanges columns({PositionRange{GlobalPosition(first), 128, 4}});
    const Tensor keys = gather(whole.key.view(), columns);
    const Tensor values = gather(whole.value.view(), columns);
    const Mirror key(keys, *device_);
    const Mirror value(values, *device_);
    AttentionBlock block{query.view(), key.at(as_bthd(keys)), value.at(as_bthd(values)),
                         whole.rows(), columns};
    if (first > 0) block.state = state;
    attention.run(block, state, *stream_);
    stream_->synchronize();
  }
  output.download();
  lse.download();
  EXPECT_LE(error_of(result, problem.dtype, truth).output, 1.05 * once);
}

TEST_F(CudaFlash, PartsOfSequenceLayouts) {
  Random random(87);
  expect_parts_of_layouts_accurate(random, DType::bfloat16);
}

// A hidden value never affects a row, whatever it is; a visible one does.
TEST_F(CudaFlash, HiddenNanAndInfinity) {
  Random random(88);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem = problem_of({2, 400, 400, 2, 1, dim, dim});
    problem.mask.set_causal(true);
    problem.mask.set_kv_lengths({350, 400});
    WholeAttention whole = random_attention(random, problem);
    const Result clean = run_on_device(implementation(), whole, *device_, *stream_);
    const auto overwrite = [&](const Tensor& tensor, std::int64_t batch, std::int64_t position,
                               float with) {
      const TensorView row = tensor.view().slice(0, batch, 1).slice(1, position, 1);
      const std::vector<float> values(static_cast<std::size_t>(row.elements()), with);
      from_float32(values.data(), row.dtype(), row.data(), row.elements());
    };
    overwrite(whole.value, 0, 360, kNan);  // behind the length
    overwrite(whole.key, 0, 380, kNan);
    overwrite(whole.value, 1, 250, std::numeric_limits<float>::infinity());
    overwrite(whole.key, 1, 300, kNan);
    overwrite(whole.value, 1, 390, kNan);
    const Result result = run_on_device(implementation(), whole, *device_, *stream_);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t t = 0; t < 400; ++t) {
        for (std::int64_t n = 0; n < 2; ++n) {
          for (std::int64_t d = 0; d < dim; ++d) {
            const auto got = result.output.view().at<float>({b, t, n, d});
            if (b == 1 && t >= 250) {
              ASSERT_FALSE(std::isfinite(got)) << b << " " << t << " " << n << " " << d;
            } else {
              ASSERT_NEAR(got, clean.output.view().at<float>({b, t, n, d}), 2e-2)
                  << b << " " << t << " " << n << " " << d;
            }
          }
        }
      }
    }
    // The list of items to repair is emptied afterwards: the kernel can be used again.
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaFlash, LogitsOfMinusInfinityAndWeightsOfZero) {
  const auto run = [&](const WholeAttention& whole) {
    return run_on_device(implementation(), whole, *device_, *stream_);
  };
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const std::int64_t dim : {8, 128, 256}) {
      expect_weightless_shown(run(weightless_attention(dtype, dim)));
      expect_nan_without_weight_shown(dtype, dim, run);
    }
  }
}

TEST_F(CudaFlash, IsRightAtTheEndsOfTheRange) {
  for (const std::int64_t dim : {64, 128, 256}) {
    const WholeAttention whole = widest_attention(DType::bfloat16, dim, 1e6);
    expect_right_at_the_ends_of_the_range(
        whole, run_on_device(implementation(), whole, *device_, *stream_));
  }
}

TEST_F(CudaFlash, RunsRepeatEveryBit) {
  Random random(89);
  AttentionProblem problem = problem_of({2, 700, 700, 8, 2, 128, 128});
  problem.mask = random_mask(random, {MaskKind::causal, MaskKind::documents}, 2, 700, 700);
  const WholeAttention whole = random_attention(random, problem);
  const Result first = run_on_device(implementation(), whole, *device_, *stream_);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(run_on_device(implementation(), whole, *device_, *stream_) == first);
  }
}

// The last part may round.
TEST_F(CudaFlash, ContinuesAState) {
  Random random(90);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const DType last : {DType::float32, DType::bfloat16}) {
      for (const std::vector<MaskKind>& kinds :
           {std::vector<MaskKind>{}, std::vector{MaskKind::causal},
            std::vector{MaskKind::window, MaskKind::documents},
            std::vector{MaskKind::query_lengths, MaskKind::kv_lengths}}) {
        AttentionProblem problem = problem_of({2, 300, 500, 4, 2, dim, dim});
        problem.mask = random_mask(random, kinds, 2, 300, 500);
        const WholeAttention whole = random_attention(random, problem);
        flash::FlashAttention attention(problem, *device_);
        const Result result =
            run_in_parts(whole, {{300, 200}, {0, 0}, {0, 170}, {170, 130}}, last,
                         [&](const AttentionBlock& block, const SoftmaxState& into) {
                           attention.run(block, into, *stream_);
                         });
        SCOPED_TRACE(to_string(problem.shape) + " mask " + to_string(problem.mask));
        expect_accurate(result, whole, whole.oracle());
      }
    }
  }
}

TEST_F(CudaFlash, RefusesWhatItCannot) {
  const Place place = device_->place();
  const auto reason = [&](const AttentionProblem& problem) {
    return implementation().capability(problem, place).reason();
  };
  EXPECT_THAT(reason(problem_of({1, 8, 8, 1, 1, 64, 64}, DType::float64)), HasSubstr("float64"));
  EXPECT_THAT(reason(problem_of({1, 8, 8, 1, 1, 60, 64})), HasSubstr("60 with 64"));
  EXPECT_THAT(reason(problem_of({1, 8, 8, 1, 1, 64, 264})), HasSubstr("64 with 264"));
  EXPECT_THAT(reason(problem_of({1, 8, std::int64_t{1} << 29, 1, 1, 64, 64})),
              HasSubstr("positions"));
  AttentionProblem problem = problem_of({1, 8, 8, 1, 1, 64, 64});
  problem.scale = -1.0;
  EXPECT_THAT(reason(problem), HasSubstr("scale"));
  EXPECT_THAT(implementation().capability(problem, Place::host()).reason(), HasSubstr("CPU"));

  Random random(91);
  problem.scale = 1.0;
  const WholeAttention whole = random_attention(random, problem);
  const Result result(whole.block());
  const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
  const auto refusal = [&](const AttentionBlock& block) {
    return message_of<UnsupportedError>([&] { kernel->prepare(block, result.state()); });
  };
  AttentionBlock block = whole.block();
  block.key = ConstTensorView(block.key.data(), block.key.dtype(), {1, 8, 1, 64},
                              Extents{8 * 68, 68, 68, 1});
  EXPECT_THAT(refusal(block), HasSubstr("key has strides"));
  block = whole.block();
  block.value = ConstTensorView(static_cast<const std::byte*>(block.value.data()) + 2,
                                block.value.dtype(), block.value.shape());
  EXPECT_THAT(refusal(block), HasSubstr("value does not begin"));
}

}  // namespace
}  // namespace annulus::test
