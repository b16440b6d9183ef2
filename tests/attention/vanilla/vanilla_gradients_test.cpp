#include <array>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/gradients_run.hpp"
#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

const Implementation& vanilla() {
  static const Registry registry = Registry::standard();
  return registry.get("vanilla");
}

constexpr std::array kDTypes{DType::float32, DType::float16, DType::bfloat16, DType::float64};

TEST(VanillaGradients, EveryMask) {
  Random random(51);
  for (const std::vector<MaskKind>& kinds : mask_combinations()) {
    AttentionProblem problem = problem_of({2, 17, 23, 4, 2, 5, 6});
    problem.mask = random_mask(random, kinds, 2, 17, 23);
    if (draw(random, 0, 1) == 0) {
      problem.mask.set_block_mask(random_block_mask(random, 2, 4, 17, 23, 6));
    }
    const WholeGradients whole(random, problem);
    whole.add(vanilla(), whole.block(), whole.gradients());
    EXPECT_LT(whole.largest_share(), 0.5) << to_string(problem.mask);
  }
}

TEST(VanillaGradients, EveryModifier) {
  Random random(52);
  for (const DType dtype : kDTypes) {
    for (unsigned chosen = 0; chosen < 64; ++chosen) {
      const auto has = [&](unsigned bit) { return (chosen >> bit & 1U) != 0; };
      AttentionProblem problem = problem_of({2, 13, 19, 6, 3, 8, 4}, dtype);
      problem.mask.set_causal(has(0));
      if (has(1)) problem.scale = -0.6;
      if (has(2)) problem.soft_cap = 1.5;
      if (has(3)) problem.dropout.emplace(0.3, chosen);
      if (has(4)) {
        Extents shape{2, 6, 13, 19};
        for (int dim = 0; dim < 4; ++dim) {
          if (draw(random, 0, 1) == 0) shape[dim] = 1;
        }
        problem.bias = shape;
        problem.dense_mask = Extents{1, 6, 13, 19};
      }
      if (has(5)) problem.sinks = Sinks::random(6, 2, chosen);
      const WholeGradients whole(random, problem);
      whole.add(vanilla(), whole.block(), whole.gradients(), 2);
      EXPECT_LT(whole.largest_share(), 0.5) << name_of(dtype) << ' ' << chosen;
    }
  }
}

TEST(VanillaGradients, BlocksAddUp) {
  expect_blocks_add_up(gradients_by(vanilla()));
}

TEST(VanillaGradients, AddsToWhatIsThere) {
  Random random(54);
  const WholeGradients whole(random, problem_of({1, 9, 9, 2, 1, 4, 4}));
  whole.add(vanilla(), whole.block(), whole.gradients());
  const std::vector<float> once(whole.key.view().as<float>(), whole.key.view().as<float>() + 36);
  whole.add(vanilla(), whole.block(), whole.gradients());
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_EQ(entry(whole.key, i), 2 * once[i]);
}

TEST(VanillaGradients, WhatIsNotWantedIsNotWritten) {
  Random random(55);
  AttentionProblem problem = problem_of({1, 9, 9, 2, 1, 4, 4});
  problem.bias = Extents{1, 1, 9, 9};
  const WholeGradients all(random, problem);
  const Gradients gradients = all.gradients();
  all.add(vanilla(), all.block(), {.value = gradients.value});
  for (std::size_t i = 0; i < 36; ++i) {
    EXPECT_EQ(entry(all.key, i), 0);
    EXPECT_NE(entry(all.value, i), 0);
  }
}

TEST(VanillaGradients, Declares) {
  AttentionProblem problem = problem_of({1, 9, 9, 2, 1, 4, 4});
  const Place host = Place::host();
  EXPECT_TRUE(vanilla().fits_backward(problem, host));
  problem.dtype = DType::float64;
  EXPECT_TRUE(vanilla().fits_backward(problem, host));
  problem.normalize_output = false;
  EXPECT_FALSE(vanilla().fits_backward(problem, host));
  EXPECT_TRUE(vanilla().fits(problem, host));
  problem.normalize_output = true;
  problem.weights = true;
  EXPECT_FALSE(vanilla().fits_backward(problem, host));
}

}  // namespace
}  // namespace annulus::test
