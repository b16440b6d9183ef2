// The flash kernels under prefixes, sink tokens, chunks, offsets per batch and two packings.
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/flash/cuda_flash_run.hpp"

namespace annulus::test {
namespace {

class CudaFlashPositions : public CudaFlashTest {
 protected:
  CudaFlashPositions() : CudaFlashTest("flash_attn2") {}

  void expect_all_accurate(Random& random, const std::vector<DType>& dtypes) {
    const std::int64_t dims[] = {64, 128, 256};
    std::size_t i = 0;
    for (const std::vector<MaskKind>& kinds : position_combinations()) {
      const std::int64_t dim = dims[i % 3];
      AttentionProblem problem =
          problem_of({2, 331, 493, 2, 1, dim, dim}, dtypes[i % dtypes.size()]);
      problem.mask = random_mask(random, kinds, 2, 331, 493);
      if (i++ % 5 == 0) problem.soft_cap = 3.0;
      expect_whole_accurate(random_attention(random, problem));
    }
  }
};

TEST_F(CudaFlashPositions, OfEveryKindBesideEveryOther) {
  Random random(141);
  expect_all_accurate(random, {DType::bfloat16, DType::float16});
}

TEST_F(CudaFlashPositions, InFloat32) {
  Random random(142);
  expect_all_accurate(random, {DType::float32});
}

TEST_F(CudaFlashPositions, WithDropout) {
  Random random(143);
  const std::int64_t dims[] = {64, 128, 256};
  std::size_t i = 0;
  for (const MaskKind kind : kPositionKinds) {
    for (const MaskKind other : {MaskKind::causal, MaskKind::left_window, MaskKind::documents,
                                 MaskKind::segments, MaskKind::query_lengths}) {
      const std::int64_t dim = dims[i % 3];
      AttentionProblem problem = problem_of({2, 331, 493, 4, 2, dim, dim},
                                            i++ % 2 == 0 ? DType::bfloat16 : DType::float16);
      problem.mask = random_mask(random, {kind, other, MaskKind::chunk}, 2, 331, 493);
      problem.dropout.emplace(0.3, 7);
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

// Positions are global, wherever rows and columns are held.
TEST_F(CudaFlashPositions, OfPartsOfSequenceLayouts) {
  Random random(144);
  AttentionProblem problem = problem_of({2, 1000, 1000, 2, 1, 128, 128});
  for (const MaskKind kind : kPositionKinds) {
    for (const MaskKind other : {MaskKind::causal, MaskKind::left_window, MaskKind::kv_lengths}) {
      problem.mask = random_mask(random, {kind, other, MaskKind::sink_tokens}, 2, 1000, 1000);
      const WholeAttention whole = random_attention(random, problem);
      for (const LayoutKind layout_kind :
           {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
        const SequenceLayout layout(layout_kind, 1000, 3);
        expect_part_accurate(whole, layout.positions(0), layout.positions(2));
        expect_part_accurate(whole, layout.positions(1), layout.positions(1));
        expect_part_accurate(whole, layout.positions(2), layout.positions(0));
      }
    }
  }
}

class CudaBlocksparsePositions : public CudaFlashTest {
 protected:
  CudaBlocksparsePositions() : CudaFlashTest("blocksparse") {}
};

TEST_F(CudaBlocksparsePositions, BesideBlocks) {
  Random random(145);
  for (const MaskKind kind : kPositionKinds) {
    for (const MaskKind other : {MaskKind::causal, MaskKind::window, MaskKind::segments}) {
      AttentionProblem problem = problem_of({2, 331, 493, 4, 2, 128, 128});
      problem.mask = random_mask(random, {kind, other}, 2, 331, 493);
      problem.mask.set_block_mask(random_block_mask(random, 2, 4, 331, 493, 200));
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

}  // namespace
}  // namespace annulus::test
