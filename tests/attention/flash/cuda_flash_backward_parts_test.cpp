// Gradients of wide heads, whose dS has memory for a part of the heads and queries at a time.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "flash/backward/kernels.hpp"
#include "flash/backward/score_gradients.hpp"
#include "tests/attention/flash/cuda_flash_backward.hpp"
#include "tests/attention/gradient_cases.hpp"

namespace annulus::test {
namespace {

using flash::backward::Arguments;
using flash::backward::bytes_for;
using flash::backward::divide_into_parts;
using flash::backward::kWideQueryTiles;
using flash::backward::score_gradient_bytes;
using flash::backward::ScoreGradients;

constexpr std::int64_t kTileBytes = 64 * 64 * 2;
constexpr Dims kWideDims[] = {{192, 128}, {256, 256}};

Arguments arguments_of(std::int32_t batches, std::int32_t heads, std::int32_t kv_heads,
                       std::int32_t length) {
  Arguments a;
  a.batches = batches;
  a.heads = heads;
  a.heads_per_kv_head = heads / kv_heads;
  a.rows = a.columns = a.padded_rows = length;
  return a;
}

TEST(ScoreGradientParts, FitTheMemory) {
  for (const auto& [heads, kv_heads] : {std::pair{16, 16}, {64, 8}, {40, 1}}) {
    for (const std::int32_t length : {64, 4096, 16384, 131072, 1 << 20}) {
      const Arguments a = arguments_of(2, heads, kv_heads, length);
      const ScoreGradients parts = divide_into_parts(a, length / 64, true);
      ASSERT_GE(parts.pairs, 1);
      ASSERT_GE(parts.heads, 1);
      ASSERT_LE(parts.pairs, 2 * kv_heads);
      ASSERT_LE(parts.heads, heads / kv_heads);
      ASSERT_LE(parts.query_tiles, length / 64);
      if (parts.query_tiles < length / 64) {
        EXPECT_EQ(parts.query_tiles % kWideQueryTiles, 0);
      }
      // 64 query tiles of the longest sequence have 8 GiB.
      const std::int64_t few = 2 * 32 * (length / 64) * kTileBytes;
      EXPECT_LE(bytes_for(a, parts), std::max(score_gradient_bytes, few)) << length;
    }
  }
}

TEST(ScoreGradientParts, AreOneIfTheMemorySuffices) {
  const Arguments a = arguments_of(1, 8, 4, 4096);
  const ScoreGradients parts = divide_into_parts(a, 64, true);
  EXPECT_EQ(parts.pairs, 4);
  EXPECT_EQ(parts.heads, 2);
  EXPECT_EQ(parts.query_tiles, 64);
  EXPECT_EQ(bytes_for(a, parts), 8 * 64 * 64 * kTileBytes);
}

TEST(ScoreGradientParts, AreOneWithoutQueryGradient) {
  const Arguments a = arguments_of(1, 16, 16, 1 << 20);
  const ScoreGradients parts = divide_into_parts(a, 1 << 14, false);
  EXPECT_EQ(parts.pairs, 16);
  EXPECT_EQ(parts.query_tiles, 1 << 14);
}

class CudaFlashBackwardParts : public CudaFlashBackward {
 protected:
  CudaFlashBackwardParts() { score_gradient_bytes = kTileBytes; }
  ~CudaFlashBackwardParts() override { score_gradient_bytes = usual_; }

  void expect_wide_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, kWideDims);
  }

 private:
  std::int64_t usual_ = score_gradient_bytes;
};

// 40 query tiles of two heads, in parts of 16.
TEST_F(CudaFlashBackwardParts, OfQueries) {
  const Arguments a = arguments_of(1, 4, 2, 2560);
  ASSERT_EQ(divide_into_parts(a, 5, true).query_tiles, 14);
  Random random(61);
  AttentionProblem problem = half_problem({1, 2500, 300, 4, 2, 0, 0});
  expect_wide_accurate(random, problem);
  problem.mask.set_causal(true);
  problem.mask.set_offset(-1100);
  expect_wide_accurate(random, problem);
  problem.mask.set_window(200, -1);
  expect_wide_accurate(random, problem);
  problem.mask.set_sink_tokens(70);  // by lists
  expect_wide_accurate(random, problem);
  problem.dropout.emplace(0.2, 7);
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, OfHeadsOfAGroup) {
  const Arguments a = arguments_of(1, 34, 1, 256);
  ASSERT_LT(divide_into_parts(a, 4, true).heads, 34);
  Random random(62);
  AttentionProblem problem = causal_half_problem({1, 200, 200, 34, 1, 0, 0});
  expect_wide_accurate(random, problem);
  problem.mask.set_sink_tokens(3);
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, OfBatchesAndHeads) {
  const Arguments a = arguments_of(3, 10, 5, 448);
  const std::int32_t pairs = divide_into_parts(a, 7, true).pairs;
  ASSERT_GT(pairs, 1);
  ASSERT_LT(pairs, 15);
  Random random(63);
  AttentionProblem problem = half_problem({3, 430, 390, 10, 5, 0, 0});
  problem.mask.set_kv_lengths({390, 200, 1});
  problem.mask.set_query_lengths({300, 430, 100});
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, UnderBlockMasksOfHeads) {
  name_ = "blocksparse";
  Random random(64);
  AttentionProblem problem = half_problem({1, 2500, 600, 4, 2, 0, 0});
  problem.mask.set_block_mask(BlockMask::random(2500, 600, 4, 0.3, 5, BlockSize{64, 128}));
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, RepeatBits) {
  Random random(65);
  for (const Dims& dims : kWideDims) {
    AttentionProblem problem =
        causal_problem_of({1, 2500, 700, 4, 2, dims.head, dims.value}, DType::bfloat16);
    expect_same_bits(random, problem);
  }
}

// Hidden values of parts that begin within a word of the lists' bits.
TEST_F(CudaFlashBackwardParts, HiddenValuesReachNothing) {
  Random random(66);
  for (const Dims& dims : kWideDims) {
    AttentionProblem problem =
        causal_problem_of({1, 2500, 500, 2, 1, dims.head, dims.value}, DType::bfloat16);
    problem.mask.set_offset(-1500);
    for (const bool lists : {false, true}) {
      if (lists) problem.mask.set_sink_tokens(2);
      WholeAttention forward = random_operands(random, problem);
      fill(forward.key, 400, std::numeric_limits<float>::quiet_NaN());
      fill(forward.value, 450, std::numeric_limits<float>::infinity());
      const WholeGradients whole(random, std::move(forward));
      add(whole);
      expect_same_reach(whole);
    }
  }
}

}  // namespace
}  // namespace annulus::test
