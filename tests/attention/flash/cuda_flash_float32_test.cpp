// The flash kernel of float32 tensors against the oracle, what it must not see, and what it
// refuses.
#include <cmath>
#include <limits>
#include <string>
#include <utility>

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

AttentionProblem float32_problem(const AttentionShape& shape) {
  return problem_of(shape, DType::float32);
}

class CudaFlashFloat32 : public CudaFlashTest {
 protected:
  CudaFlashFloat32() : CudaFlashTest("flash_attn2") {}
  explicit CudaFlashFloat32(std::string name) : CudaFlashTest(std::move(name)) {}

  Result run(const WholeAttention& whole) {
    return run_on_device(implementation(), whole, *device_, *stream_);
  }
};

class CudaBlocksparseFloat32 : public CudaFlashFloat32 {
 protected:
  CudaBlocksparseFloat32() : CudaFlashFloat32("blocksparse") {}
};

TEST_F(CudaFlashFloat32, EveryMaskAloneAndInPairs) {
  Random random(121);
  const std::int64_t dims[] = {64, 128, 256, 20};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    const std::int64_t dim = dims[i % 4];
    AttentionProblem problem = float32_problem({2, 231, 393, 4, 2, dim, dim});
    problem.mask = random_mask(random, kinds, 2, 231, 393);
    if (i % 5 == 0) problem.soft_cap = 3.0;
    if (i++ % 7 == 0) problem.scale = -0.2;
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaFlashFloat32, HeadDimensions) {
  Random random(122);
  expect_dimensions_accurate(random, DType::float32, {{4, 40}, {12, 132}, {256, 4}});
}

TEST_F(CudaFlashFloat32, EdgesOfTiles) {
  Random random(123);
  expect_edges_accurate(
      random, DType::float32,
      {{1, 1}, {1, 300}, {300, 1}, {64, 64}, {63, 65}, {65, 63}, {128, 128}, {193, 257}});
}

TEST_F(CudaFlashFloat32, GroupedHeadsAndManyItems) {
  Random random(124);
  expect_grouped_heads_accurate(random, DType::float32);
}

// Large logits have large rounding errors of their own.
TEST_F(CudaFlashFloat32, HugeAndTinyLogits) {
  Random random(125);
  for (const double scale : {-3.0, 0.0, 1e-4, 3.0, 30.0}) {
    for (const std::int64_t dim : {64, 128}) {
      AttentionProblem problem = float32_problem({1, 260, 260, 2, 2, dim, dim});
      problem.scale = scale;
      problem.mask.set_causal(true);
      const WholeAttention whole = random_attention(random, problem);
      const Error error = error_of(run(whole), problem.dtype, whole.oracle());
      const double size = std::abs(scale);
      EXPECT_LE(error.output, accuracy_bound(problem.dtype, 260).output * (1 + size)) << scale;
      EXPECT_LE(error.lse, 1e-5 + 1e-4 * size) << scale;
    }
  }
}

// Beyond logits of about 30, what float32 rounds in a sum of 128 products is more than the bound of
// the LSE.
TEST_F(CudaFlashFloat32, SoftCaps) {
  Random random(126);
  for (const double cap : {0.5, 5.0, 50.0}) {
    for (const double scale : {-0.1, 0.1, 0.3}) {
      AttentionProblem problem = float32_problem({1, 260, 390, 4, 2, 128, 128});
      problem.soft_cap = cap;
      problem.scale = scale;
      problem.mask.set_window(100, 200);
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

TEST_F(CudaFlashFloat32, PartsOfSequenceLayouts) {
  Random random(127);
  expect_parts_of_layouts_accurate(random, DType::float32);
}

// A hidden value never reaches a row, not even with a bit; a visible one does.
TEST_F(CudaFlashFloat32, NanAndInfinityReachTheRowsThatSeeThem) {
  expect_non_finite_confined(DType::float32,
                             [&](const WholeAttention& whole) { return run(whole); });
  for (const std::int64_t dim : {64, 128, 256}) {
    expect_nan_without_weight_shown(DType::float32, dim,
                                    [&](const WholeAttention& whole) { return run(whole); });
  }
}

TEST_F(CudaFlashFloat32, IsRightAtTheEndsOfTheRange) {
  for (const std::int64_t dim : {64, 128, 256}) {
    const WholeAttention whole = widest_attention(DType::float32, dim);
    expect_right_at_the_ends_of_the_range(whole, run(whole));
  }
}

TEST_F(CudaFlashFloat32, ContinuesAState) {
  Random random(128);
  const auto in_parts = [&](const WholeAttention& whole, const Pairs& parts) {
    flash::FlashAttention attention(whole.problem, *device_);
    return run_in_parts(whole, parts, std::nullopt,
                        [&](const AttentionBlock& block, const SoftmaxState& into) {
                          attention.run(block, into, *stream_);
                        });
  };
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const std::vector<MaskKind>& kinds :
         {std::vector<MaskKind>{}, std::vector{MaskKind::causal},
          std::vector{MaskKind::window, MaskKind::documents},
          std::vector{MaskKind::query_lengths, MaskKind::kv_lengths}}) {
      AttentionProblem problem = float32_problem({2, 300, 500, 4, 2, dim, dim});
      problem.mask = random_mask(random, kinds, 2, 300, 500);
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      SCOPED_TRACE(to_string(problem.shape) + " mask " + to_string(problem.mask));
      const Result result = in_parts(whole, {{0, 170}, {170, 0}, {170, 130}, {300, 200}});
      expect_accurate(result, whole, truth);
      const Error unsharded = error_of(run(whole), DType::float32, truth);
      EXPECT_LE(error_of(result, DType::float32, truth).output,
                sharded_error_factor(2 * 300 * 4) * unsharded.output);
    }
  }
  const WholeAttention whole = weightless_attention(DType::float32, 64);
  expect_weightless_shown(run(whole));
  expect_weightless_shown(in_parts(whole, {{0, 100}, {100, 300}, {400, 200}}));
}

TEST_F(CudaFlashFloat32, RunsRepeatEveryBit) {
  Random random(129);
  AttentionProblem problem = float32_problem({2, 700, 700, 8, 2, 128, 128});
  problem.mask = random_mask(random, {MaskKind::causal, MaskKind::documents}, 2, 700, 700);
  const WholeAttention whole = random_attention(random, problem);
  const Result first = run(whole);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(run(whole) == first);
}

TEST_F(CudaFlashFloat32, RefusesWhatItCannot) {
  const auto reason = [&](const AttentionShape& shape) {
    return implementation().capability(float32_problem(shape), device_->place()).reason();
  };
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 62, 64}), HasSubstr("62 with 64"));
  EXPECT_THAT(reason({1, 8, 8, 1, 1, 64, 260}), HasSubstr("64 with 260"));

  Random random(130);
  const AttentionProblem problem = float32_problem({1, 8, 8, 1, 1, 64, 64});
  const WholeAttention whole = random_attention(random, problem);
  const Result result(whole.block());
  const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
  const auto refusal = [&](const AttentionBlock& block) {
    return message_of<UnsupportedError>([&] { kernel->prepare(block, result.state()); });
  };
  AttentionBlock block = whole.block();
  block.key = ConstTensorView(block.key.data(), block.key.dtype(), {1, 8, 1, 64},
                              Extents{8 * 66, 66, 66, 1});
  EXPECT_THAT(refusal(block), HasSubstr("key has strides"));
  block = whole.block();
  block.value = ConstTensorView(static_cast<const std::byte*>(block.value.data()) + 4,
                                block.value.dtype(), block.value.shape());
  EXPECT_THAT(refusal(block), HasSubstr("value does not begin"));
}

TEST_F(CudaBlocksparseFloat32, BesideEveryMaskAndPairOfMasks) {
  Random random(131);
  const std::int64_t dims[] = {64, 128, 256};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    const std::int64_t dim = dims[i % 3];
    AttentionProblem problem = float32_problem({2, 231, 393, 4, 2, dim, dim});
    problem.mask = random_mask(random, kinds, 2, 231, 393);
    problem.mask.set_block_mask(
        i % 4 < 2 ? random_block_mask(random, 2, 4, 231, 393, 200)
                  : BlockMask::random(231, 393, 4, 0.5, static_cast<std::uint64_t>(i)));
    ++i;
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaBlocksparseFloat32, HiddenNanAndInfinity) {
  Random random(132);
  for (const BlockSize& size : {BlockSize{}, BlockSize{90, 50}}) {
    AttentionProblem problem = float32_problem({2, 700, 700, 4, 2, 64, 64});
    problem.mask.set_block_mask(BlockMask::random(700, 700, 4, 0.4, 5, size));
    const WholeAttention whole = random_attention(random, problem);
    const Result clean = run(whole);
    for (const bool in_keys : {false, true}) {
      const NonFinite entries{in_keys, std::numeric_limits<float>::quiet_NaN(), {300, 303, 699}};
      expect_confined(whole, entries, clean, run(with_non_finite(whole, entries)));
    }
  }
}

}  // namespace
}  // namespace annulus::test
