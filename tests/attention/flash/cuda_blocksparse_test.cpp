// The flash kernel with block masks, against the oracle, and what it must not see.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include <annulus/partition/sequence_layout.hpp>

#include "flash/flash_attention.hpp"
#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/non_finite.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

class CudaBlocksparse : public CudaFlashTest {
 protected:
  CudaBlocksparse() : CudaFlashTest("blocksparse") {}
};

TEST_F(CudaBlocksparse, BesideEveryMaskAndPairOfMasks) {
  Random random(101);
  const std::int64_t dims[] = {64, 128, 256};
  int i = 0;
  for (const std::vector<MaskKind>& kinds : kinds_beside_blocks()) {
    const std::int64_t dim = dims[i % 3];
    AttentionProblem problem =
        problem_of({2, 331, 493, 4, 2, dim, dim}, i % 2 == 0 ? DType::bfloat16 : DType::float16);
    problem.mask = random_mask(random, kinds, 2, 331, 493);
    problem.mask.set_block_mask(
        i % 4 < 2 ? random_block_mask(random, 2, 4, 331, 493, 200)
                  : BlockMask::random(331, 493, 4, 0.5, static_cast<std::uint64_t>(i)));
    if (i++ % 5 == 0) problem.soft_cap = 3.0;
    expect_whole_accurate(random_attention(random, problem));
  }
}

TEST_F(CudaBlocksparse, RandomDensities) {
  Random random(102);
  for (const double density : {0.0, 0.06, 0.11, 0.26, 0.5, 1.0}) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{192, 128}, std::pair{256, 256}}) {
      for (const std::int64_t heads : {1, 8}) {
        AttentionProblem problem = problem_of({1, 1280, 1280, 8, 2, dim, value_dim});
        problem.mask.set_block_mask(BlockMask::random(1280, 1280, heads, density, 1));
        expect_whole_accurate(random_attention(random, problem));
      }
    }
  }
}

TEST_F(CudaBlocksparse, BlocksOfAnySize) {
  Random random(103);
  for (const BlockSize& size :
       {BlockSize{64, 64}, BlockSize{17, 33}, BlockSize{128, 96}, BlockSize{200, 50},
        BlockSize{256, 384}, BlockSize{300, 1000}, BlockSize{5, 3}}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      AttentionProblem problem = problem_of({2, 390, 520, 4, 2, dim, dim});
      problem.mask.set_block_mask(BlockMask::random(390, 520, 4, 0.4, 2, size));
      expect_whole_accurate(random_attention(random, problem));
      problem.mask.set_causal(true);
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

TEST_F(CudaBlocksparse, NamedPatterns) {
  Random random(104);
  AttentionProblem problem = problem_of({1, 1500, 1500, 4, 1, 128, 128});
  for (const BlockMask& blocks :
       {BlockMask::causal(1500, 1500), BlockMask::window(1500, 1500, 200, 0),
        BlockMask::sinks_and_window(1500, 1500, 4, 200, 0), BlockMask::strided(1500, 1500, 2, 3),
        BlockMask::documents(std::vector<std::int32_t>{0, 300, 301, 900, 1500})}) {
    for (const bool causal : {false, true}) {
      problem.mask = Mask();
      problem.mask.set_causal(causal);
      problem.mask.set_block_mask(blocks);
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

// A batch may have entries of its own, and so may a head: the lists of both are found.
TEST_F(CudaBlocksparse, EntriesByBatchAndByHead) {
  Random random(105);
  for (const Extents& shape : {Extents{3, 1, 4, 5}, Extents{3, 6, 4, 5}, Extents{1, 6, 1, 5},
                               Extents{3, 1, 4, 1}, Extents{4, 5}}) {
    std::vector<std::uint8_t> entries(static_cast<std::size_t>(shape.product()));
    for (std::uint8_t& entry : entries) entry = draw(random, 0, 1) == 0 ? 1 : 0;
    AttentionProblem problem = problem_of({3, 500, 600, 6, 3, 128, 128});
    problem.mask.set_block_mask(BlockMask(shape, {}, entries));
    expect_whole_accurate(random_attention(random, problem));
    const std::vector<std::int32_t> ids = random_segments(random, 3, 500);
    problem.mask.set_segments(3, ids, random_segments(random, 3, 600));
    expect_whole_accurate(random_attention(random, problem));
  }
}

// One kernel computes several groups of heads of a problem, as a ring by heads has it do.
TEST_F(CudaBlocksparse, HeadsOfAShardSeeTheirOwnBlocks) {
  Random random(106);
  AttentionProblem problem = problem_of({1, 400, 400, 8, 4, 64, 64});
  problem.mask.set_block_mask(BlockMask::random(400, 400, 8, 0.4, 3));
  const WholeAttention whole = random_attention(random, problem);
  const Mirror query(whole.query, *device_);
  const Mirror key(whole.key, *device_);
  const Mirror value(whole.value, *device_);
  Result result(whole.block());
  const Mirror output(result.output, *device_);
  const Mirror lse(result.lse, *device_);
  flash::FlashAttention attention(problem, *device_);
  for (const auto& [first, heads] : {std::pair{6, 2}, std::pair{0, 2}, std::pair{2, 4}}) {
    AttentionBlock block{query.view().slice(2, first, heads),
                         key.view().slice(2, first / 2, heads / 2),
                         value.view().slice(2, first / 2, heads / 2),
                         whole.rows(),
                         whole.columns(),
                         0,
                         first,
                         false,
                         {}};
    attention.run(block, {output.view().slice(2, first, heads), lse.view().slice(1, first, heads)},
                  *stream_);
  }
  stream_->synchronize();
  output.download();
  lse.download();
  expect_accurate(result, whole, whole.oracle());
}

TEST_F(CudaBlocksparse, PartsOfSequenceLayouts) {
  Random random(107);
  AttentionProblem problem = problem_of({2, 1000, 1000, 2, 1, 128, 128});
  for (const std::vector<MaskKind>& kinds :
       {std::vector<MaskKind>{}, std::vector{MaskKind::causal},
        std::vector{MaskKind::causal, MaskKind::documents}, std::vector{MaskKind::segments}}) {
    problem.mask = random_mask(random, kinds, 2, 1000, 1000);
    problem.mask.set_block_mask(BlockMask::random(1000, 1000, 2, 0.5, 4, {128, 64}));
    const WholeAttention whole = random_attention(random, problem);
    for (const LayoutKind kind :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped}) {
      const SequenceLayout layout(kind, 1000, 3);
      expect_part_accurate(whole, layout.positions(0), layout.positions(2));
      expect_part_accurate(whole, layout.positions(1), layout.positions(1));
    }
  }
}

// Hidden tiles are not touched, so that not even a bit of other rows changes.
TEST_F(CudaBlocksparse, HiddenNanAndInfinity) {
  Random random(108);
  for (const std::int64_t dim : {64, 128}) {
    AttentionProblem problem = problem_of({2, 700, 700, 4, 2, dim, dim});
    problem.mask.set_block_mask(BlockMask::random(700, 700, 4, 0.4, 5));
    const WholeAttention whole = random_attention(random, problem);
    const Result clean = run_on_device(implementation(), whole, *device_, *stream_);
    for (const bool in_keys : {false, true}) {
      for (const float value :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        if (in_keys && !std::isnan(value)) continue;
        const NonFinite entries{in_keys, value, {300, 303, 699}};
        const WholeAttention bad = with_non_finite(whole, entries);
        expect_confined(whole, entries, clean,
                        run_on_device(implementation(), bad, *device_, *stream_));
      }
    }
  }
}

// Blocks that are no multiple of a tile share tiles with hidden keys and values.
TEST_F(CudaBlocksparse, HiddenNanBesideVisibleKeys) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  Random random(109);
  for (const std::int64_t dim : {64, 128, 256}) {
    AttentionProblem problem = problem_of({2, 400, 400, 4, 2, dim, dim});
    problem.mask.set_block_mask(BlockMask::random(400, 400, 4, 0.5, 6, {90, 50}));
    const WholeAttention whole = random_attention(random, problem);
    const Result clean = run_on_device(implementation(), whole, *device_, *stream_);
    for (const bool in_keys : {false, true}) {
      const NonFinite entries{in_keys, kNan, {110, 266}};
      const WholeAttention bad = with_non_finite(whole, entries);
      const Result result = run_on_device(implementation(), bad, *device_, *stream_);
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t n = 0; n < 4; ++n) {
          for (std::int64_t t = 0; t < 400; ++t) {
            bool sees = false;
            for (const std::int64_t j : entries.positions) {
              sees = sees ||
                     (n < 2 && problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(j)));
            }
            const auto got = result.output.view().at<float>({b, t, n, NonFinite::kDim});
            if (sees) {
              ASSERT_TRUE(std::isnan(got)) << b << " " << n << " " << t;
            } else {
              ASSERT_NEAR(got, clean.output.view().at<float>({b, t, n, NonFinite::kDim}), 2e-2)
                  << b << " " << n << " " << t;
            }
          }
        }
      }
    }
    expect_whole_accurate(random_attention(random, problem));
  }
}

// The parts cut blocks.
TEST_F(CudaBlocksparse, ContinuesAState) {
  Random random(110);
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const BlockSize& size : {BlockSize{}, BlockSize{60, 70}}) {
      AttentionProblem problem = problem_of({2, 300, 500, 4, 2, dim, dim});
      problem.mask.set_causal(dim == 128);
      problem.mask.set_block_mask(BlockMask::random(300, 500, 4, 0.5, 7, size));
      const WholeAttention whole = random_attention(random, problem);
      flash::FlashAttention attention(problem, *device_);
      const Result result =
          run_in_parts(whole, {{300, 200}, {0, 170}, {170, 130}}, std::nullopt,
                       [&](const AttentionBlock& block, const SoftmaxState& into) {
                         attention.run(block, into, *stream_);
                       });
      SCOPED_TRACE(to_string(problem.shape) + " mask " + to_string(problem.mask));
      expect_accurate(result, whole, whole.oracle());
    }
  }
}

TEST_F(CudaBlocksparse, WithAllBlocksItIsTheDenseKernelBitByBit) {
  Random random(111);
  const Registry registry = Registry::standard();
  for (const bool causal : {false, true}) {
    AttentionProblem problem = problem_of({1, 700, 700, 4, 2, 128, 128});
    problem.mask.set_causal(causal);
    const WholeAttention dense = random_attention(random, problem);
    const Result expected = run_on_device(registry.get("flash_attn2"), dense, *device_, *stream_);
    EXPECT_TRUE(run_on_device(implementation(), dense, *device_, *stream_) == expected);
    problem.mask.set_block_mask(BlockMask::random(700, 700, 4, 1.0, 0));
    EXPECT_TRUE(run_on_device(implementation(), problem, dense.block(),
                              {dense.query, dense.key, dense.value}, *device_,
                              *stream_) == expected);
  }
}

TEST_F(CudaBlocksparse, RunsRepeatEveryBit) {
  Random random(112);
  AttentionProblem problem = problem_of({2, 900, 900, 8, 2, 128, 128});
  problem.mask.set_causal(true);
  problem.mask.set_block_mask(BlockMask::random(900, 900, 8, 0.3, 8));
  const WholeAttention whole = random_attention(random, problem);
  const Result first = run_on_device(implementation(), whole, *device_, *stream_);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(run_on_device(implementation(), whole, *device_, *stream_) == first);
  }
}

TEST_F(CudaBlocksparse, RefusesWhatItCannot) {
  const auto reason = [&](DType dtype, std::int64_t dim, Place place) {
    AttentionProblem problem = problem_of({1, 8, 8, 1, 1, dim, dim}, dtype);
    problem.mask.set_block_mask(BlockMask::causal(8, 8));
    return implementation().capability(problem, place).reason();
  };
  EXPECT_EQ(reason(DType::bfloat16, 64, device_->place()), "");
  EXPECT_EQ(reason(DType::float32, 60, device_->place()), "");
  EXPECT_THAT(reason(DType::float64, 64, device_->place()), HasSubstr("float64"));
  EXPECT_THAT(reason(DType::bfloat16, 60, device_->place()), HasSubstr("60 with 60"));
  EXPECT_THAT(reason(DType::bfloat16, 64, Place::host()), HasSubstr("CPU"));
}

}  // namespace
}  // namespace annulus::test
