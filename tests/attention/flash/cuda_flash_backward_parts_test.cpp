// Gradients of wide heads, whose dS has memory for a part of a call at a time.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "flash/backward/kernels.hpp"
#include "flash/backward/score_gradients.hpp"
#include "tests/attention/flash/cuda_flash_backward.hpp"
#include "tests/attention/gradient_cases.hpp"

namespace annulus::test {
namespace {

using flash::backward::Arguments;
using flash::backward::bytes_of;
using flash::backward::divide_into_parts;
using flash::backward::kWideQueryTiles;
using flash::backward::score_gradient_bytes;
using flash::backward::ScoreGradients;

constexpr std::int64_t kTileBytes = 64 * 64 * 2;
constexpr std::int64_t kFewBytes = 32 * kTileBytes;
constexpr Dims kWideDims[] = {{192, 128}, {256, 256}};

Arguments arguments_of(std::int32_t batches, std::int32_t heads, std::int32_t kv_heads,
                       std::int32_t rows, std::int32_t columns) {
  Arguments a;
  a.batches = batches;
  a.heads = heads;
  a.heads_per_kv_head = heads / kv_heads;
  a.rows = a.padded_rows = rows;
  a.columns = columns;
  return a;
}

TEST(ScoreGradientParts, FitTheMemory) {
  for (const std::int64_t bytes : {kFewBytes, score_gradient_bytes}) {
    for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {16, 16}, {64, 8}, {40, 1}}) {
      for (const std::int32_t length : {64, 4096, 16384, 131072, 1 << 20, 1 << 28}) {
        const Arguments a = arguments_of(2, heads, kv_heads, length, length);
        for (const std::int64_t seen : {1, 65, length / 64}) {
          const ScoreGradients parts = divide_into_parts(a, seen, bytes);
          ASSERT_GE(parts.pairs, 1);
          ASSERT_GE(parts.heads, 1);
          ASSERT_GE(parts.query_tiles, 1);
          ASSERT_GE(parts.key_tiles, 1);
          ASSERT_LE(parts.pairs, 2 * kv_heads);
          ASSERT_LE(parts.heads, heads / kv_heads);
          ASSERT_LE(parts.query_tiles, length / 64);
          EXPECT_LE(bytes_of(parts), bytes) << length;
          // A part that is not the last has whole blocks.
          if (parts.query_tiles < length / 64) {
            EXPECT_EQ(parts.query_tiles % kWideQueryTiles, 0);
          }
          if (parts.key_tiles < length / 64) {
            EXPECT_EQ(parts.key_tiles % 2, 0);
            EXPECT_EQ(parts.places, parts.key_tiles);
          } else {
            EXPECT_GE(parts.places, std::min<std::int64_t>(seen, length / 64));
          }
        }
      }
    }
  }
}

// Parts have enough blocks for most multiprocessors of a GPU, however long the sequence is.
TEST(ScoreGradientParts, HaveManyBlocks) {
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {16, 16}, {64, 8}, {40, 1}}) {
    for (const std::int32_t length : {16384, 131072, 1 << 20}) {
      const Arguments a = arguments_of(1, heads, kv_heads, length, length);
      const ScoreGradients parts = divide_into_parts(a, length / 64, score_gradient_bytes);
      EXPECT_GE(parts.pairs * parts.key_tiles / 2, 112) << heads << ' ' << length;
      EXPECT_GE(parts.pairs * parts.heads * parts.query_tiles / kWideQueryTiles, 112) << length;
    }
  }
}

// If keys were divided, many parts of a sparse mask would have no visible pair.
TEST(ScoreGradientParts, HaveAllKeysOfSparseMasks) {
  const Arguments a = arguments_of(1, 8, 8, 1 << 20, 1 << 20);
  EXPECT_EQ(divide_into_parts(a, 300, score_gradient_bytes).key_tiles, 1 << 14);
  EXPECT_LT(divide_into_parts(a, 8000, score_gradient_bytes).key_tiles, 1 << 14);
}

TEST(ScoreGradientParts, HaveAllHeadsAndQueriesThatFit) {
  const ScoreGradients parts =
      divide_into_parts(arguments_of(1, 512, 64, 192, 16384), 256, score_gradient_bytes);
  EXPECT_EQ(parts.heads, 8);
  EXPECT_EQ(parts.query_tiles, 3);
}

TEST(ScoreGradientParts, AreOneIfTheMemorySuffices) {
  const Arguments a = arguments_of(1, 8, 4, 4096, 4096);
  const ScoreGradients parts = divide_into_parts(a, 64, score_gradient_bytes);
  EXPECT_EQ(parts.pairs, 4);
  EXPECT_EQ(parts.heads, 2);
  EXPECT_EQ(parts.query_tiles, 64);
  EXPECT_EQ(parts.key_tiles, 64);
  EXPECT_EQ(bytes_of(parts), 8 * 64 * 64 * kTileBytes);
}

class CudaFlashBackwardParts : public CudaFlashBackward {
 protected:
  CudaFlashBackwardParts() { score_gradient_bytes = kFewBytes; }
  ~CudaFlashBackwardParts() override { score_gradient_bytes = usual_; }

  void expect_wide_accurate(Random& random, const AttentionProblem& problem) {
    expect_accurate(random, problem, kWideDims);
  }
  void expect_accurate_under_masks(Random& random, AttentionProblem problem) {
    expect_wide_accurate(random, problem);
    problem.mask.set_causal(true);
    problem.mask.set_offset((problem.shape.kv_length - problem.shape.query_length) / 2);
    expect_wide_accurate(random, problem);
    problem.mask.set_window(200, -1);
    expect_wide_accurate(random, problem);
    problem.mask.set_sink_tokens(70);  // by lists
    expect_wide_accurate(random, problem);
    problem.dropout.emplace(0.2, 7);
    expect_wide_accurate(random, problem);
  }

 private:
  std::int64_t usual_ = score_gradient_bytes;
};

TEST_F(CudaFlashBackwardParts, OfQueries) {
  const ScoreGradients parts =
      divide_into_parts(arguments_of(1, 2, 1, 1152, 300), 5, score_gradient_bytes);
  ASSERT_EQ(parts.query_tiles, 2);
  ASSERT_EQ(parts.key_tiles, 5);
  Random random(61);
  expect_accurate_under_masks(random, half_problem({1, 1100, 300, 2, 1, 0, 0}));
}

TEST_F(CudaFlashBackwardParts, OfKeys) {
  const ScoreGradients parts =
      divide_into_parts(arguments_of(1, 2, 1, 320, 1100), 18, score_gradient_bytes);
  ASSERT_EQ(parts.query_tiles, 2);
  ASSERT_EQ(parts.key_tiles, 10);
  Random random(62);
  expect_accurate_under_masks(random, half_problem({1, 300, 1100, 2, 1, 0, 0}));
}

TEST_F(CudaFlashBackwardParts, OfHeadsOfAGroup) {
  ASSERT_LT(divide_into_parts(arguments_of(1, 34, 1, 256, 200), 4, score_gradient_bytes).heads, 34);
  Random random(63);
  AttentionProblem problem = causal_half_problem({1, 200, 200, 34, 1, 0, 0});
  expect_wide_accurate(random, problem);
  problem.mask.set_sink_tokens(3);
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, OfBatchesAndHeads) {
  score_gradient_bytes = 1024 * kTileBytes;
  const std::int32_t pairs =
      divide_into_parts(arguments_of(3, 10, 5, 448, 390), 7, score_gradient_bytes).pairs;
  ASSERT_GT(pairs, 1);
  ASSERT_LT(pairs, 15);
  Random random(64);
  AttentionProblem problem = half_problem({3, 430, 390, 10, 5, 0, 0});
  problem.mask.set_kv_lengths({390, 200, 1});
  problem.mask.set_query_lengths({300, 430, 100});
  expect_wide_accurate(random, problem);
}

TEST_F(CudaFlashBackwardParts, UnderBlockMasksOfHeads) {
  name_ = "blocksparse";
  Random random(65);
  for (const auto& [rows, columns] : {std::pair{1100, 300}, {300, 1100}}) {
    AttentionProblem problem = half_problem({1, rows, columns, 4, 2, 0, 0});
    problem.mask.set_block_mask(BlockMask::random(rows, columns, 4, 0.9, 5, BlockSize{64, 128}));
    expect_wide_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackwardParts, RepeatBits) {
  Random random(66);
  for (const Dims& dims : kWideDims) {
    expect_same_bits(
        random, causal_problem_of({1, 700, 1100, 2, 1, dims.head, dims.value}, DType::bfloat16));
  }
}

// Hidden values in the first key tile of a part, which begins within a word of the lists' bits.
TEST_F(CudaFlashBackwardParts, HiddenValuesReachNothing) {
  ASSERT_EQ(
      divide_into_parts(arguments_of(1, 1, 1, 1152, 1100), 18, score_gradient_bytes).key_tiles, 10);
  Random random(67);
  for (const Dims& dims : kWideDims) {
    AttentionProblem problem =
        causal_problem_of({1, 1100, 1100, 1, 1, dims.head, dims.value}, DType::bfloat16);
    problem.mask.set_offset(-450);  // the last row sees keys before 650
    for (const bool lists : {false, true}) {
      if (lists) problem.mask.set_sink_tokens(2);
      WholeAttention forward = random_operands(random, problem);
      fill(forward.key, 660, std::numeric_limits<float>::quiet_NaN());
      fill(forward.value, 670, std::numeric_limits<float>::infinity());
      const WholeGradients whole(random, std::move(forward));
      add(whole);
      expect_same_reach(whole);
    }
  }
}

}  // namespace
}  // namespace annulus::test
