#include <cstdint>

#include <gtest/gtest.h>

#include <annulus/attention/problem_class.hpp>
#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/problem_of.hpp"

namespace annulus {
namespace {

AttentionProblem plain(std::int64_t dim = 128, DType dtype = DType::bfloat16) {
  return test::problem_of({1, 16, 16, 4, 2, dim, dim}, dtype);
}

double assumed(const char* name, const ProblemClass& problem, Place place) {
  static const Registry registry = Registry::standard();
  return registry.get(name).assumed_rate(problem, place);
}

TEST(ProblemClass, TheMostWorkPerPairDecides) {
  AttentionProblem problem = plain();
  EXPECT_EQ(class_of(problem), (ProblemClass{DType::bfloat16, 128, 128, MaskKind::none, false}));
  problem.mask.set_window(3, 3);
  EXPECT_EQ(class_of(problem).mask, MaskKind::band);
  problem = plain();
  problem.mask.set_causal(true);
  EXPECT_EQ(class_of(problem).mask, MaskKind::band);
  problem.mask.set_kv_lengths({9});
  EXPECT_EQ(class_of(problem).mask, MaskKind::segments);
  problem.mask.set_kv_lengths({});
  problem.mask.set_segments(1, std::vector<std::int32_t>(16), std::vector<std::int32_t>(16));
  EXPECT_EQ(class_of(problem).mask, MaskKind::segments);
  problem.mask.set_block_mask(BlockMask::random(16, 16, 1, 0.5, 1, {8, 8}));
  EXPECT_EQ(class_of(problem).mask, MaskKind::blocks);
  for (const auto scores : {&AttentionProblem::bias, &AttentionProblem::dense_mask}) {
    AttentionProblem general = problem;
    general.*scores = Extents{1, 1, 1, 16};
    EXPECT_EQ(class_of(general).mask, MaskKind::general);
  }
  problem.dropout.emplace(0.1, 1);
  EXPECT_EQ(class_of(problem).mask, MaskKind::general);
  EXPECT_FALSE(class_of(problem).soft_cap);
  problem.soft_cap = 20;
  EXPECT_TRUE(class_of(problem).soft_cap);
}

TEST(ProblemClass, NamesReadBack) {
  for (const MaskKind kind :
       {MaskKind::none, MaskKind::band, MaskKind::segments, MaskKind::blocks, MaskKind::general}) {
    EXPECT_EQ(parse_mask_kind(name_of(kind)), kind);
  }
  EXPECT_THROW((void)parse_mask_kind("fog"), ArgumentError);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    EXPECT_EQ(parse_pass(name_of(pass)), pass);
    EXPECT_EQ(class_of(plain(), pass).pass, pass);
  }
  EXPECT_THROW((void)parse_pass("sideways"), ArgumentError);
  EXPECT_EQ(to_string(class_of(plain(), Pass::backward)),
            "bfloat16 D=128 Dv=128, mask none, backward");
  EXPECT_EQ(to_string(ProblemClass{DType::float32, 192, 128, MaskKind::general, true}),
            "float32 D=192 Dv=128, mask general, soft cap");
}

// Ratios that were measured on one GPU (benchmarks/NOTES.md).
TEST(AssumedRates, OfGpuKernelsAreThoseOfTheirClass) {
  const Place gpu = Place::cuda(0);
  const auto flash = [&](const ProblemClass& problem) {
    return assumed("flash_attn2", problem, gpu);
  };
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const MaskKind mask : {MaskKind::none, MaskKind::band}) {
      const ProblemClass problem{DType::float16, dim, dim, mask, false};
      const double ratio = flash(problem) / assumed("sdpa", problem, gpu);
      EXPECT_GT(ratio, 1.03) << to_string(problem);
      EXPECT_LT(ratio, 1.18) << to_string(problem);
    }
  }
  const ProblemClass causal{DType::bfloat16, 128, 128, MaskKind::band, false};
  ProblemClass other = causal;
  other.soft_cap = true;
  EXPECT_DOUBLE_EQ(flash(other), 0.8 * flash(causal));
  other = causal;
  other.head_dim = other.value_dim = 96;  // padded to 128
  EXPECT_DOUBLE_EQ(flash(other), 0.75 * flash(causal));
  other = causal;
  other.mask = MaskKind::general;
  EXPECT_DOUBLE_EQ(flash(other), 300e12);
  other = causal;
  other.dtype = DType::float32;
  EXPECT_DOUBLE_EQ(flash(other), 41e12);
  EXPECT_LT(assumed("native", causal, gpu), flash(causal) / 500);
}

// True if our kernel or cuDNN's computes gradients faster depends on mask and head dimension.
TEST(AssumedRates, OfTheBackwardPassAreItsOwn) {
  const Place gpu = Place::cuda(0);
  const ProblemClass causal{DType::bfloat16, 128, 128, MaskKind::band, false, Pass::backward};
  ProblemClass forward = causal;
  forward.pass = Pass::forward;
  for (const char* name : {"flash_attn2", "sdpa", "native"}) {
    EXPECT_LT(assumed(name, causal, gpu), assumed(name, forward, gpu)) << name;
  }
  ProblemClass wide = causal;
  wide.head_dim = wide.value_dim = 256;
  EXPECT_GT(assumed("flash_attn2", wide, gpu), assumed("sdpa", wide, gpu));
  EXPECT_LT(assumed("native", causal, gpu), assumed("sdpa", causal, gpu) / 200);
  ProblemClass latent = causal;
  latent.head_dim = 192;
  EXPECT_GT(assumed("sdpa", latent, gpu), assumed("flash_attn2", latent, gpu));
  latent.mask = MaskKind::none;
  EXPECT_LT(assumed("sdpa", latent, gpu), assumed("flash_attn2", latent, gpu));
  for (const char* name : {"native", "vanilla"}) {
    EXPECT_GT(assumed(name, causal, Place::host()), 0) << name;
  }
}

TEST(AssumedRates, OfACoreFallWithTheMaskAndTheHeadDimension) {
  const auto native = [](const ProblemClass& problem) {
    return assumed("native", problem, Place::host());
  };
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const ProblemClass full{dtype, 64, 64, MaskKind::none, false};
    ProblemClass other = full;
    other.head_dim = other.value_dim = 16;
    EXPECT_DOUBLE_EQ(native(other), native(full) / 4);
    other.head_dim = other.value_dim = 128;
    EXPECT_GE(native(other), native(full));
    const double at_128 = native(other);
    other.head_dim = other.value_dim = 512;
    EXPECT_DOUBLE_EQ(native(other), at_128);
    other = full;
    other.mask = MaskKind::segments;
    EXPECT_LT(native(other), native(full));
    other = full;
    other.soft_cap = true;
    EXPECT_LT(native(other), native(full));
    EXPECT_LT(assumed("vanilla", full, Place::host()), native(full) / 10);
  }
}

}  // namespace
}  // namespace annulus
