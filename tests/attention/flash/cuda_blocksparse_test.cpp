// The flash kernel with block masks, against the oracle, and what it must not see.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include "tests/attention/flash/cuda_flash_run.hpp"
#include "tests/attention/non_finite.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

class CudaBlocksparse : public CudaFlashTest {
 protected:
  CudaBlocksparse() : CudaFlashTest("blocksparse") {}
};

TEST_F(CudaBlocksparse, RandomDensities) {
  Random random(102);
  for (const double density : {0.0, 0.06, 0.11, 0.26, 0.5, 1.0}) {
    for (const auto& [dim, value_dim] :
         {std::pair{64, 64}, std::pair{128, 128}, std::pair{192, 128}, std::pair{256, 256}}) {
      for (const std::int64_t heads : {1, 8}) {
        AttentionProblem problem = half_problem({1, 1280, 1280, 8, 2, dim, value_dim});
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
      AttentionProblem problem = half_problem({2, 390, 520, 4, 2, dim, dim});
      problem.mask.set_block_mask(BlockMask::random(390, 520, 4, 0.4, 2, size));
      expect_whole_accurate(random_attention(random, problem));
      problem.mask.set_causal(true);
      expect_whole_accurate(random_attention(random, problem));
    }
  }
}

TEST_F(CudaBlocksparse, NamedPatterns) {
  Random random(104);
  AttentionProblem problem = half_problem({1, 1500, 1500, 4, 1, 128, 128});
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

// Hidden tiles are not touched, so that not even a bit of other rows changes.
TEST_F(CudaBlocksparse, HiddenNanAndInfinity) {
  Random random(108);
  for (const std::int64_t dim : {64, 128}) {
    AttentionProblem problem = half_problem({2, 700, 700, 4, 2, dim, dim});
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

TEST_F(CudaBlocksparse, WithAllBlocksItIsTheDenseKernelBitByBit) {
  Random random(111);
  const Registry registry = Registry::standard();
  for (const bool causal : {false, true}) {
    AttentionProblem problem = half_problem({1, 700, 700, 4, 2, 128, 128});
    problem.mask.set_causal(causal);
    const WholeAttention dense = random_attention(random, problem);
    const Result expected = run_on_device(registry.get("flash_attn2"), dense, *device_, *stream_);
    EXPECT_TRUE(run_on_device(implementation(), dense, *device_, *stream_) == expected);
    problem.mask.set_block_mask(BlockMask::random(700, 700, 4, 1.0, 0));
    EXPECT_TRUE(run_on_device(implementation(), problem, dense.block(), *device_, *stream_) ==
                expected);
  }
}

TEST_F(CudaBlocksparse, RefusesWhatItCannot) {
  const auto reason = [&](DType dtype, std::int64_t dim, Place place) {
    AttentionProblem problem = half_problem({1, 8, 8, 1, 1, dim, dim}, dtype);
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
