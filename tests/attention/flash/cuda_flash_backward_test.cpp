// Gradients of flash attention on the device, against the oracle's.
#include "tests/attention/flash/cuda_flash_backward.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include <annulus/core/error.hpp>

#include "tests/attention/gradient_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_F(CudaFlashBackward, FullAndCausal) {
  Random random(1);
  expect_all_accurate(random, half_problem({2, 256, 128, 2, 2, 0, 0}));
  expect_all_accurate(random, causal_half_problem({2, 200, 200, 8, 1, 0, 0}));
}

TEST_F(CudaFlashBackward, OddLengths) {
  Random random(2);
  expect_all_accurate(random, causal_half_problem({1, 133, 221, 4, 2, 0, 0}, 88));
  expect_all_accurate(random, half_problem({1, 1, 130, 4, 2, 0, 0}));
  expect_all_accurate(random, half_problem({1, 300, 1, 4, 2, 0, 0}));
}

TEST_F(CudaFlashBackward, WindowsAndRowsThatSeeNothing) {
  Random random(3);
  AttentionProblem window = half_problem({1, 400, 400, 2, 2, 0, 0});
  window.mask.set_window(100, 7);
  expect_all_accurate(random, window);
  expect_all_accurate(random, causal_half_problem({1, 300, 300, 2, 1, 0, 0}, -150));
}

// There are more key tiles than multiprocessors, so two blocks share some of them.
TEST_F(CudaFlashBackward, ManyKeyTilesOfEqualWork) {
  Random random(69);
  for (const Dims& dims : {Dims{64, 64}, {128, 128}}) {
    expect_accurate(random, problem_of({1, 200, 200, 70, 70, dims.head, dims.value}, dims.dtype));
  }
}

// Rows have even positions and columns odd ones, so no row sees a key in a window of one key.
TEST_F(CudaFlashBackward, NothingOfAnEmptyBand) {
  Random random(68);
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem = problem_of({1, 300, 300, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.mask.set_window(0, 0);
    const WholeGradients whole(random, problem);
    add(whole, {part_of(whole, 0, {0, 150, 2}, {1, 129, 2})});
    EXPECT_THAT(floats_of(whole), Each(0.0F));
  }
}

TEST_F(CudaFlashBackward, LengthsOfBatches) {
  Random random(4);
  AttentionProblem problem = causal_half_problem({3, 300, 300, 4, 2, 0, 0});
  problem.mask.set_query_lengths({300, 70, 130});
  problem.mask.set_kv_lengths({129, 0, 300});
  expect_all_accurate(random, problem);
}

TEST_F(CudaFlashBackward, OtherHeadDimensions) {
  Random random(5);
  for (const Dims& dims : {Dims{8, 8},
                           {80, 80},
                           {96, 64},
                           {96, 96},
                           {64, 128},
                           {136, 72},
                           {192, 128},
                           {160, 160},
                           {72, 200},
                           {248, 16},
                           {4, 124, DType::float32},
                           {100, 36, DType::float32},
                           {64, 12, DType::float32}}) {
    AttentionProblem problem =
        causal_problem_of({2, 150, 170, 2, 1, dims.head, dims.value}, dims.dtype);
    expect_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackward, BlocksAddUp) {
  for (const Dims& dims : kAllDims) expect_blocks_add_up(dims);
}

TEST_F(CudaFlashBackward, UnmaskedBlocksSeeEverything) {
  Random random(7);
  for (const Dims& dims : {Dims{64, 64}, {192, 128}, {128, 128, DType::float32}}) {
    expect_unmasked_sees_everything(
        random, problem_of({1, 200, 200, 2, 1, dims.head, dims.value}, dims.dtype));
  }
}

TEST_F(CudaFlashBackward, GradientsThatAreNotWantedStay) {
  Random random(8);
  for (const Dims& dims : {Dims{64, 64}, {192, 128}, {256, 256}, {128, 128, DType::float32}}) {
    AttentionProblem problem =
        causal_problem_of({1, 200, 200, 4, 2, dims.head, dims.value}, dims.dtype);
    expect_gradients_one_by_one(WholeGradients(random, problem));
  }
}

TEST_F(CudaFlashBackward, HiddenValuesReachNothing) {
  for (const Dims& dims : kAllDims) {
    for (const DType dtype : {dims.dtype, DType::float16}) {
      if (dtype != dims.dtype && dims.dtype == DType::float32) continue;
      const AddGradients by_flash = [&](const WholeGradients& whole, const BackwardBlock& block,
                                        const Gradients& gradients) {
        add(whole, {{block, gradients}});
      };
      expect_nothing_of_hidden_values(300, dims.head, dims.value, dtype, by_flash, 1);
    }
  }
}

TEST_F(CudaFlashBackward, VisibleNonFiniteValuesReachThoseThatSeeThem) {
  Random random(10);
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem = problem_of({1, 600, 600, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.mask.set_window(30, 10);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.key, 100, std::numeric_limits<float>::quiet_NaN());
    fill(forward.value, 300, kInfinity, 3);
    fill(forward.query, 500, std::numeric_limits<float>::quiet_NaN(), 1);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
  }
}

// Products of finite but large values overflow. Hidden pairs must not show it.
TEST_F(CudaFlashBackward, HiddenProductsMayOverflow) {
  Random random(11);
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem = problem_of({1, 200, 200, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.mask.set_kv_lengths({150});
    WholeAttention forward = random_operands(random, problem);
    fill(forward.value, 160, 3e38F);
    fill(forward.key, 161, 3e38F);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
  }
}

// dS of float16 neither overflows nor vanishes: rows see few keys, with large gradients, or many,
// with small ones.
TEST_F(CudaFlashBackward, Float16GradientsOfAnyMagnitude) {
  Random random(60);
  for (const Dims& dims : kAllDims) {
    if (dims.dtype == DType::float32) continue;
    for (const auto& [keys, values, gradients] :
         {std::tuple{3, 16.F, 0x1p11F}, {4000, 0x1p-6F, 0x1p-14F}, {100, 1.F, 1.F}}) {
      for (const bool modified : {false, true}) {
        AttentionProblem problem =
            problem_of({1, 70, keys, 2, 1, dims.head, dims.value}, DType::float16);
        if (modified) problem.dropout.emplace(0.3, 7);
        SCOPED_TRACE(to_string(problem.shape));
        WholeAttention forward = random_operands(random, problem);
        multiply(forward.value, values);
        const WholeGradients whole(random, std::move(forward), gradients);
        add(whole);
        EXPECT_LT(whole.largest_share(), 1);
      }
    }
  }
}

// Weights of 2^-20 and less would be subnormal. A sink takes the rest.
TEST_F(CudaFlashBackward, Float16GradientsOfSmallWeights) {
  Random random(64);
  for (const Dims& dims : kAllDims) {
    if (dims.dtype == DType::float32) continue;
    for (const bool modified : {false, true}) {
      AttentionProblem problem =
          problem_of({1, 70, 200, 2, 1, dims.head, dims.value}, DType::float16);
      problem.sinks = Sinks(Extents{2, 1}, {14, 14});
      if (modified) problem.dropout.emplace(0.3, 7);
      const WholeGradients whole(random, problem);
      add(whole);
      EXPECT_LT(whole.largest_share(), 1) << dims.head << (modified ? " with dropout" : "");
    }
  }
}

// All products of dO and values add up: |dP| is as large as it can be.
TEST_F(CudaFlashBackward, Float16GradientsOfLargeValues) {
  Random random(63);
  for (const Dims& dims : kAllDims) {
    if (dims.dtype == DType::float32) continue;
    WholeAttention forward = random_operands(
        random, problem_of({1, 70, 2, 2, 1, dims.head, dims.value}, DType::float16));
    multiply(forward.key, 0x1p-7F);  // so that both keys have half of the weight
    fill(forward.value, 0, 0x1p15F);
    fill(forward.value, 1, -0x1p15F);
    const WholeGradients whole(random, std::move(forward), 1, 1);
    add(whole);
    EXPECT_LT(whole.largest_share(), 1) << dims.head;
  }
}

// Rows that see no key, and keys past a length, hold large finite values: others keep their
// precision. With sinks, the LSE of such a row is finite.
TEST_F(CudaFlashBackward, Float16ScalesIgnoreHiddenValues) {
  Random random(62);
  for (const Dims& dims : kAllDims) {
    if (dims.dtype == DType::float32) continue;
    for (const auto& [modified, sinks] :
         {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      AttentionProblem problem =
          causal_problem_of({1, 100, 100, 2, 1, dims.head, dims.value}, DType::float16, -20);
      problem.mask.set_kv_lengths({70});
      if (modified) problem.dropout.emplace(0.3, 7);
      WholeGradients whole(random, random_operands(random, problem), 0x1p-6F);
      for (std::int64_t t = 0; t < 20; ++t) {
        fill(whole.grad_output, t, 6e4F);
        for (std::int64_t n = 0; n < 2; ++n) {
          // Some are so large that the factor makes them infinite.
          whole.delta.view().at<float>({0, n, t}) = t % 2 == 0 ? -1e30F : -1e36F;
          if (sinks) whole.lse.view().at<float>({0, n, t}) = 0.5F;
        }
      }
      for (std::int64_t s = 70; s < 100; ++s) fill(whole.forward.value, s, 6e4F);
      add(whole);
      EXPECT_LT(whole.largest_share(), 1) << dims.head << (modified ? " with dropout" : "");
    }
  }
}

// A gradient of any kind that is NaN fails the tests above.
TEST(WholeGradients, ANanIsTheLargestShare) {
  Random random(61);
  WholeGradients whole(random, half_problem({1, 4, 4, 1, 1, 8, 8}));
  for (const Tensor* tensor : {&whole.query, &whole.key, &whole.value}) {
    float& entry = tensor->view().at<float>({0, 1, 0, 2});
    entry = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(whole.largest_share()));
    entry = 0;
  }
}

// Small scores use a tanh without exponentials. Scores near the cap, and all scores under huge
// caps, use other formulas.
TEST_F(CudaFlashBackward, SoftCaps) {
  Random random(14);
  for (const double cap : {0.5, 30.0, 1e5}) {
    AttentionProblem problem = half_problem({1, 200, 300, 4, 2, 0, 0});
    problem.soft_cap = cap;
    problem.mask.set_causal(true);
    problem.mask.set_offset(90);
    expect_all_accurate(random, problem);
    problem.scale = -0.3;
    expect_all_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackward, SoftCapsOfHiddenValuesThatAreNotFinite) {
  Random random(15);
  for (const Dims& dims : {Dims{64, 64}, {192, 128}, {64, 64, DType::float32}}) {
    AttentionProblem problem = problem_of({1, 300, 300, 2, 1, dims.head, dims.value}, dims.dtype);
    problem.soft_cap = 2;
    problem.mask.set_window(30, 10);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.key, 100, std::numeric_limits<float>::quiet_NaN());
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
  }
}

TEST_F(CudaFlashBackward, InTurns) {
  Random random(16);
  repeats_bits_ = true;
  AttentionProblem problem = half_problem({2, 400, 500, 4, 2, 0, 0});
  problem.mask.set_kv_lengths({500, 300});
  expect_all_accurate(random, problem);
  problem.mask.set_causal(true);
  problem.mask.set_offset(100);
  expect_all_accurate(random, problem);
  problem.mask.set_window(150, -1);
  expect_all_accurate(random, problem);
  problem.mask.set_window(50, -1);
  expect_all_accurate(random, problem);
}

// More blocks than run at a time, and tiles that are computed pair by pair.
TEST_F(CudaFlashBackward, RepeatsBits) {
  Random random(17);
  for (const Dims& dims : {Dims{64, 64}, {128, 128}, {256, 256}, {128, 128, DType::float32}}) {
    for (const bool causal : {false, true}) {
      WholeGradients whole(random, problem_of({1, 1, 1, 1, 1, dims.head, dims.value}, dims.dtype));
      AttentionProblem problem =
          problem_of({2, 2048, 2048, 16, 8, dims.head, dims.value}, dims.dtype);
      problem.mask.set_causal(causal);
      problem.mask.set_kv_lengths({2000, 2000});
      whole.forward = random_operands(random, problem);
      fill(whole.forward.value, 2010, std::numeric_limits<float>::quiet_NaN());
      whole.grad_output = random_operand(random, problem.dtype, whole.forward.query.shape());
      whole.delta = random_tensor(random, DType::float32, {2, 16, 2048});
      whole.lse = random_tensor(random, DType::float32, {2, 16, 2048});
      for (std::int64_t i = 0; i < whole.lse.shape().product(); ++i) {
        whole.lse.view().as<float>()[i] += 8;
      }
      std::vector<float> results[11];
      for (int run = 0; run < 11; ++run) {
        repeats_bits_ = run < 10;
        for (Tensor* const tensor : {&whole.query, &whole.key, &whole.value}) {
          const Tensor& operand = tensor == &whole.query ? whole.forward.query : whole.forward.key;
          *tensor = zeros(DType::float32, operand.shape());
        }
        add(whole);
        for (const Tensor* tensor : {&whole.query, &whole.key, &whole.value}) {
          const float* const values = tensor->view().as<float>();
          results[run].insert(results[run].end(), values, values + tensor->shape().product());
        }
      }
      const std::size_t count = results[0].size();
      for (int run = 1; run < 10; ++run) {
        ASSERT_EQ(std::memcmp(results[run].data(), results[0].data(), count * sizeof(float)), 0);
      }
      double difference = 0, magnitude = 0;
      for (std::size_t i = 0; i < count; ++i) {
        difference += std::pow(double{results[10][i]} - double{results[0][i]}, 2);
        magnitude += std::pow(double{results[0][i]}, 2);
      }
      EXPECT_GT(magnitude, 0);
      EXPECT_LT(difference, 1e-8 * magnitude);
    }
  }
}

TEST_F(CudaFlashBackward, InTurnsHiddenValuesReachNothing) {
  repeats_bits_ = true;
  const AddGradients by_flash = [&](const WholeGradients& whole, const BackwardBlock& block,
                                    const Gradients& gradients) {
    add(whole, {{block, gradients}});
  };
  for (const std::int64_t dim : {128, 256}) {
    expect_nothing_of_hidden_values(300, dim, dim, DType::bfloat16, by_flash, 1);
  }
}

// For one key tile, some query tiles are computed pair by pair, and others by products.
TEST_F(CudaFlashBackward, RepeatsBitsOfNonFiniteValues) {
  Random random(20);
  repeats_bits_ = true;
  for (const Dims& dims : kHalfDims) {
    AttentionProblem problem =
        causal_problem_of({1, 1000, 1000, 8, 2, dims.head, dims.value}, dims.dtype);
    WholeAttention forward = random_operands(random, problem);
    fill(forward.query, 500, std::numeric_limits<float>::quiet_NaN());
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    expect_same_reach(whole);
    const std::vector<float> first = floats_of(whole);
    for (int run = 1; run < 5; ++run) {
      whole.clear();
      add(whole);
      ASSERT_TRUE(same_bits(floats_of(whole), first));
    }
  }
}

TEST_F(CudaFlashBackward, NothingToCompute) {
  expect_nothing_to_compute();
}

TEST_F(CudaFlashBackward, RefusesLayoutsThatItsCopiesCannotRead) {
  Random random(13);
  const WholeGradients whole(random, half_problem({1, 64, 64, 2, 1, 64, 64}));
  const std::unique_ptr<Kernel> kernel = flash().make_kernel(whole.forward.problem, *device_);
  BackwardBlock block = whole.block();
  Gradients gradients = whole.gradients();
  gradients.key = gradients.key.slice(3, 1, 63);
  EXPECT_THAT(message_of<UnsupportedError>([&] { kernel->prepare_backward(block, gradients); }),
              HasSubstr("the key's gradient does not begin at a multiple of 16 bytes"));
  block.query = block.query.slice(3, 1, 63);
  EXPECT_THAT(
      message_of<UnsupportedError>([&] { kernel->prepare_backward(block, whole.gradients()); }),
      HasSubstr("query does not begin"));
}

TEST_F(CudaFlashBackward, SaysWhatItComputes) {
  const Place place = device_->place();
  AttentionProblem problem = half_problem({1, 64, 64, 2, 1, 264, 256});
  EXPECT_THAT(flash().fits_backward(problem, place).reason(), HasSubstr("up to 256, not 264"));
  problem.shape.head_dim = 256;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.shape.value_dim = 16;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.mask.set_prefix(10);
  problem.mask.set_causal(true);
  problem.soft_cap = 20.0;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.dropout.emplace(0.1, 1);
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.bias = Extents{1, 1, 64, 64};
  EXPECT_THAT(flash().fits_backward(problem, place).reason(), HasSubstr("beside a soft cap"));
  problem.soft_cap.reset();
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.bias.reset();
  problem.dropout.reset();
  problem.dtype = DType::float32;
  problem.shape.head_dim = problem.shape.value_dim = 128;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.dropout.emplace(0.1, 1);
  EXPECT_THAT(flash().fits_backward(problem, place).reason(), HasSubstr("not for float32"));
  problem.dropout.reset();
  problem.shape.head_dim = 132;
  EXPECT_THAT(flash().fits_backward(problem, place).reason(),
              HasSubstr("float32 gradients for head dimensions up to 128, not 132"));
  AttentionProblem in_order = half_problem({1, 64, 64, 2, 1, 64, 64});
  in_order.reproducible = Reproducible::world;
  EXPECT_TRUE(flash().fits_backward(in_order, place));
  in_order.dtype = DType::float16;
  EXPECT_THAT(flash().fits_backward(in_order, place).reason(), HasSubstr("scales float16"));
}

}  // namespace
}  // namespace annulus::test
