// Gradients of flash attention on the device with dropout.
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <annulus/attention/philox.hpp>

#include "cuda/upload.hpp"
#include "tests/attention/cuda_flash_backward.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/attention/random_mask.hpp"

namespace annulus::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::uint64_t kSeed = (std::uint64_t{3} << 40U) + 5;

TEST_F(CudaFlashBackward, Dropout) {
  Random random(51);
  AttentionProblem problem = bfloat16_problem({2, 200, 300, 4, 2, 0, 0});
  for (const double probability : {0.1, 0.7}) {
    problem.dropout.emplace(probability, kSeed);
    expect_narrow_accurate(random, problem);
  }
  problem.mask.set_causal(true);
  problem.mask.set_offset(90);
  expect_narrow_accurate(random, problem);
  problem.soft_cap = 2.0;
  expect_narrow_accurate(random, problem);
  repeats_bits_ = true;
  expect_narrow_accurate(random, problem);
}

TEST_F(CudaFlashBackward, DropoutOfOddLengths) {
  Random random(52);
  for (const auto& [rows, columns] : {std::pair{133, 221}, {1, 130}, {300, 1}, {127, 129}}) {
    AttentionProblem problem = bfloat16_problem({1, rows, columns, 2, 1, 0, 0});
    problem.dropout.emplace(0.3, kSeed);
    expect_narrow_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackward, DropoutUnderEveryMask) {
  Random random(53);
  unsigned i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    const std::int64_t dim = i % 2 == 0 ? 64 : 128;
    AttentionProblem problem = bfloat16_problem({2, 150, 210, 2, 1, dim, dim});
    if (i % 3 == 0) problem.dtype = DType::float16;
    problem.mask = random_mask(random, kinds, 2, 150, 210);
    problem.dropout.emplace(0.2, i);
    expect_accurate(random, problem);
    ++i;
  }
}

// Positions that begin anywhere and have strides, other than those that begin at multiples of 32.
TEST_F(CudaFlashBackward, DropoutOfBlocks) {
  for (const Dims& dims : {Dims{64, 64}, {128, 128}}) {
    expect_blocks_add_up(dims, Dropout(0.3, kSeed));
  }
}

// Heads, and batches, count from the problem's first.
TEST_F(CudaFlashBackward, DropoutOfPartsOfTheHeads) {
  Random random(54);
  AttentionProblem problem = bfloat16_problem({2, 150, 260, 6, 3, 64, 64});
  problem.dropout.emplace(0.3, kSeed);
  const WholeGradients whole(random, problem);
  std::vector<GradientPart> parts;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t k = 0; k < 3; ++k) {
      GradientPart part = part_of(whole, b, {0, 150}, {0, 260});
      part.block.first_head = 2 * k;
      for (ConstTensorView* view : {&part.block.query, &part.block.grad_output}) {
        *view = view->slice(2, 2 * k, 2);
      }
      for (ConstTensorView* view : {&part.block.lse, &part.block.delta}) {
        *view = view->slice(1, 2 * k, 2);
      }
      for (ConstTensorView* view : {&part.block.key, &part.block.value}) {
        *view = view->slice(2, k, 1);
      }
      part.gradients = {part.gradients.query.slice(2, 2 * k, 2), part.gradients.key.slice(2, k, 1),
                        part.gradients.value.slice(2, k, 1)};
      parts.push_back(part);
    }
  }
  add(whole, parts);
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, DropoutOfUnmaskedBlocks) {
  Random random(55);
  AttentionProblem problem = bfloat16_problem({1, 200, 200, 2, 1, 128, 128});
  problem.dropout.emplace(0.3, kSeed);
  WholeGradients whole(random, problem);
  whole.forward.problem.mask.set_causal(true);
  BackwardBlock block = whole.block();
  block.unmasked = true;
  add(whole, {{block, whole.gradients()}});
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, SeedsInDeviceMemory) {
  Random random(56);
  AttentionProblem problem = bfloat16_problem({1, 200, 200, 2, 1, 128, 128});
  problem.dropout.emplace(0.3, kSeed);
  const WholeGradients whole(random, problem);
  problem.dropout.emplace(0.3, 1);
  problem.call_arguments.dropout_seed = true;
  std::vector<std::int32_t> words;
  for (const std::uint32_t word : philox_key(kSeed)) {
    words.push_back(static_cast<std::int32_t>(word));
  }
  const Tensor key = upload(words, device_->memory());
  BackwardBlock block = whole.block();
  block.call_arguments.dropout_key = static_cast<const std::uint32_t*>(key.view().data());
  add_block(problem, block, whole.gradients());
  EXPECT_LT(whole.largest_share(), 1);
}

TEST_F(CudaFlashBackward, DropoutOfValuesThatAreNotFinite) {
  Random random(57);
  for (const std::int64_t dim : {64, 128}) {
    AttentionProblem problem = bfloat16_problem({1, 400, 400, 2, 1, dim, dim});
    problem.mask.set_window(30, 10);
    problem.dropout.emplace(0.3, kSeed);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.key, 100, kNan);
    fill(forward.value, 300, kNan, 3);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
  }
}

TEST_F(CudaFlashBackward, DropoutRepeatsBits) {
  Random random(58);
  repeats_bits_ = true;
  AttentionProblem problem = bfloat16_problem({2, 600, 700, 8, 4, 128, 128});
  problem.mask.set_causal(true);
  problem.mask.set_offset(100);
  problem.dropout.emplace(0.3, kSeed);
  const WholeGradients whole(random, problem);
  add(whole);
  EXPECT_LT(whole.largest_share(), 1);
  const std::vector<float> first = floats_of(whole);
  for (int run = 0; run < 5; ++run) {
    whole.clear();
    add(whole);
    ASSERT_TRUE(same_bits(floats_of(whole), first));
  }
}

}  // namespace
}  // namespace annulus::test
