// Gradients of flash attention on the device, against the oracle's.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include <annulus/core/error.hpp>

#include "tests/attention/cuda_gradients_run.hpp"
#include "tests/attention/gradient_cases.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Dims {
  std::int64_t head, value;
};
/// Of each kernel.
constexpr Dims kAllDims[] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}};

AttentionProblem bfloat16_problem(const AttentionShape& shape) {
  return problem_of(shape, DType::bfloat16);
}

class CudaFlashBackward : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const Capability can = flash().available(device_->place());
    if (!can) GTEST_SKIP() << can.reason();
  }

  const Registry registry_ = Registry::standard();

  [[nodiscard]] const Implementation& flash() const { return registry_.get("flash_attn2"); }

  void add(const WholeGradients& whole, const std::vector<GradientPart>& parts) {
    add_on_device(flash(), whole, parts, *device_, *stream_);
  }
  void add(const WholeGradients& whole) { add(whole, {{whole.block(), whole.gradients()}}); }

  void expect_accurate(Random& random, const AttentionProblem& problem) {
    SCOPED_TRACE(to_string(problem.shape) + " " + std::string(name_of(problem.dtype)) + " mask " +
                 to_string(problem.mask));
    const WholeGradients whole(random, problem);
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
  }
  void expect_all_accurate(Random& random, AttentionProblem problem) {
    for (const Dims& dims : kAllDims) {
      for (const DType dtype : {DType::bfloat16, DType::float16}) {
        problem.shape.head_dim = dims.head;
        problem.shape.value_dim = dims.value;
        problem.dtype = dtype;
        expect_accurate(random, problem);
      }
    }
  }
};

TEST_F(CudaFlashBackward, FullAndCausal) {
  Random random(1);
  expect_all_accurate(random, bfloat16_problem({2, 256, 128, 2, 2, 0, 0}));
  AttentionProblem causal = bfloat16_problem({2, 200, 200, 8, 1, 0, 0});
  causal.mask.set_causal(true);
  expect_all_accurate(random, causal);
}

TEST_F(CudaFlashBackward, OddLengths) {
  Random random(2);
  AttentionProblem problem = bfloat16_problem({1, 133, 221, 4, 2, 0, 0});
  problem.mask.set_causal(true);
  problem.mask.set_offset(88);
  expect_all_accurate(random, problem);
  expect_all_accurate(random, bfloat16_problem({1, 1, 130, 4, 2, 0, 0}));
  expect_all_accurate(random, bfloat16_problem({1, 300, 1, 4, 2, 0, 0}));
}

TEST_F(CudaFlashBackward, WindowsAndRowsThatSeeNothing) {
  Random random(3);
  AttentionProblem window = bfloat16_problem({1, 400, 400, 2, 2, 0, 0});
  window.mask.set_window(100, 7);
  expect_all_accurate(random, window);
  AttentionProblem late = bfloat16_problem({1, 300, 300, 2, 1, 0, 0});
  late.mask.set_causal(true);
  late.mask.set_offset(-150);
  expect_all_accurate(random, late);
}

TEST_F(CudaFlashBackward, LengthsOfBatches) {
  Random random(4);
  AttentionProblem problem = bfloat16_problem({3, 300, 300, 4, 2, 0, 0});
  problem.mask.set_causal(true);
  problem.mask.set_query_lengths({300, 70, 130});
  problem.mask.set_kv_lengths({129, 0, 300});
  expect_all_accurate(random, problem);
}

TEST_F(CudaFlashBackward, OtherHeadDimensions) {
  Random random(5);
  for (const Dims& dims : {Dims{8, 8},
                           {80, 80},
                           {96, 64},
                           {64, 128},
                           {136, 72},
                           {192, 128},
                           {160, 160},
                           {72, 200},
                           {248, 16}}) {
    AttentionProblem problem = bfloat16_problem({2, 150, 170, 2, 1, dims.head, dims.value});
    problem.mask.set_causal(true);
    expect_accurate(random, problem);
  }
}

TEST_F(CudaFlashBackward, BlocksAddUp) {
  Random random(6);
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem = bfloat16_problem({2, 320, 320, 4, 2, dims.head, dims.value});
    problem.mask.set_causal(true);
    problem.mask.set_kv_lengths({320, 250});
    const WholeGradients whole(random, problem);
    std::vector<GradientPart> parts;
    // Rows of the ranges of zigzag shards, and of every third position.
    for (const PositionRun& rows :
         std::vector<PositionRun>{{0, 80}, {240, 80}, {80, 54, 3}, {81, 53, 3}, {82, 53, 3}}) {
      const std::vector<PositionRun> columns =
          rows.step == 1 ? std::vector<PositionRun>{{0, 80}, {80, 160}, {240, 80}}
                         : std::vector<PositionRun>{{0, 107, 3}, {1, 107, 3}, {2, 106, 3}};
      for (const PositionRun& c : columns) {
        for (std::int64_t b = 0; b < 2; ++b) parts.push_back(part_of(whole, b, rows, c));
      }
    }
    add(whole, parts);
    EXPECT_LT(whole.largest_share(), 1);
  }
}

TEST_F(CudaFlashBackward, UnmaskedBlocksSeeEverything) {
  Random random(7);
  for (const Dims& dims : {Dims{64, 64}, {192, 128}}) {
    WholeGradients whole(random, bfloat16_problem({1, 200, 200, 2, 1, dims.head, dims.value}));
    whole.forward.problem.mask.set_causal(true);
    BackwardBlock block = whole.block();
    block.unmasked = true;
    add(whole, {{block, whole.gradients()}});
    EXPECT_LT(whole.largest_share(), 1);
  }
}

TEST_F(CudaFlashBackward, GradientsThatAreNotWantedStay) {
  Random random(8);
  for (const Dims& dims : {Dims{64, 64}, {256, 256}}) {
    AttentionProblem problem = bfloat16_problem({1, 200, 200, 4, 2, dims.head, dims.value});
    problem.mask.set_causal(true);
    const WholeGradients whole(random, problem);
    const Gradients all = whole.gradients();
    Gradients query, key, value;
    query.query = all.query;
    key.key = all.key;
    value.value = all.value;
    // Each by a call of its own.
    add(whole, {{whole.block(), query}, {whole.block(), key}, {whole.block(), value}});
    EXPECT_LT(whole.largest_share(), 1);
  }
}

TEST_F(CudaFlashBackward, HiddenValuesReachNothing) {
  for (const Dims& dims : kAllDims) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
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
    AttentionProblem problem = bfloat16_problem({1, 600, 600, 2, 1, dims.head, dims.value});
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

// Products of values that are finite but large overflow; where they are hidden nobody sees it.
TEST_F(CudaFlashBackward, HiddenProductsMayOverflow) {
  Random random(11);
  for (const Dims& dims : kAllDims) {
    AttentionProblem problem = bfloat16_problem({1, 200, 200, 2, 1, dims.head, dims.value});
    problem.mask.set_kv_lengths({150});
    WholeAttention forward = random_operands(random, problem);
    fill(forward.value, 160, 3e38F);
    fill(forward.key, 161, 3e38F);
    const WholeGradients whole(random, std::move(forward));
    add(whole);
    EXPECT_LT(whole.largest_share(), 1);
  }
}

TEST_F(CudaFlashBackward, NothingToCompute) {
  Random random(12);
  for (const AttentionShape& shape :
       {AttentionShape{1, 0, 128, 2, 1, 64, 64}, AttentionShape{1, 128, 0, 2, 1, 64, 64},
        AttentionShape{0, 128, 128, 2, 1, 64, 64}}) {
    const WholeGradients whole(random, bfloat16_problem(shape));
    add(whole);
    for (std::int64_t i = 0; i < whole.query.shape().product(); ++i) {
      ASSERT_EQ(entry(whole.query, static_cast<std::size_t>(i)), 0);
    }
  }
}

TEST_F(CudaFlashBackward, RefusesLayoutsThatItsCopiesCannotRead) {
  Random random(13);
  const WholeGradients whole(random, bfloat16_problem({1, 64, 64, 2, 1, 64, 64}));
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
  AttentionProblem problem = bfloat16_problem({1, 64, 64, 2, 1, 264, 256});
  EXPECT_THAT(flash().fits_backward(problem, place).reason(), HasSubstr("up to 256, not 264"));
  problem.shape.head_dim = 256;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.shape.value_dim = 16;
  EXPECT_TRUE(flash().fits_backward(problem, place));
  problem.soft_cap = 20.0;
  EXPECT_FALSE(flash().fits_backward(problem, place));
  problem.soft_cap.reset();
  problem.dtype = DType::float32;
  EXPECT_THAT(flash().fits_backward(problem, place).reason(), HasSubstr("not for float32"));
}

}  // namespace
}  // namespace annulus::test
