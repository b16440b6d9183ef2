// Block masks, sinks, biases and dense masks: parts of a problem that have tensors of their own.
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/launcher/setup/problem_setup_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST_F(ProblemSetupTest, BlockMasks) {
  options_.block_size = BlockSize{.query = 4, .kv = 3};
  EXPECT_NO_THROW(set_up()) << "meant for other problems, unless it is on the command line";
  options_.named = {"block-size"};
  EXPECT_THAT(error(), HasSubstr("--block-mask: got nothing"));
  options_.block_mask = write_bytes("blocks.npy", {4, 2, 2},
                                    {1, 0, 0, 1, 1, 1, 1, 1,  //
                                     1, 0, 1, 0, 0, 0, 0, 1});
  const Mask mask = set_up().problem.mask;
  const auto sees = [&](std::int64_t head, std::int64_t row, std::int64_t column) {
    return mask.visible(1, head, GlobalPosition(row), GlobalPosition(column));
  };
  EXPECT_TRUE(sees(0, 3, 2));
  EXPECT_FALSE(sees(0, 3, 3));
  EXPECT_TRUE(sees(0, 4, 3));
  EXPECT_FALSE(sees(3, 0, 0));
  EXPECT_TRUE(sees(3, 5, 5));
}

TEST_F(ProblemSetupTest, BlockMaskErrors) {
  options_.block_mask = write_bytes("blocks.npy", {3, 2}, {1, 0, 0, 1, 1, 1});
  EXPECT_THAT(error(),
              AllOf(HasSubstr("--block-mask"), HasSubstr("blocks.npy"), HasSubstr("[1, 1, 3, 2]"),
                    HasSubstr("[B, N, ⌈T/128⌉, ⌈S/128⌉]"), HasSubstr("[2, 4, 1, 1]")));
  options_.block_size = BlockSize{.query = 2, .kv = 3};
  EXPECT_TRUE(set_up().problem.mask.block_mask().has_value());
  options_.block_mask = write_bytes("blocks.npy", {3, 2}, {1, 0, 0, 1, 7, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("blocks.npy, entry 2, 0: got 7"), HasSubstr("0 or 1")));
  options_.block_mask = write_bytes("blocks.npy", {1, 1, 1, 3, 2}, {1, 0, 0, 1, 1, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("blocks.npy"), HasSubstr("at most 4 dimensions")));
  options_.block_mask = write("blocks.npy", {3, 2}, {1, 0, 0, 1, 1, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("blocks.npy"), HasSubstr("int32"), HasSubstr("bool")));
  options_.block_mask = path("missing.npy");
  EXPECT_THAT(error(), HasSubstr("missing.npy"));
}

TEST_F(ProblemSetupTest, RandomBlocks) {
  options_.block_size = BlockSize{.query = 1, .kv = 1};
  options_.block_mask = "random:0.5";
  const Mask mask = set_up().problem.mask;
  EXPECT_EQ(mask.block_mask()->shape(), (Extents{1, 4, 6, 6}));
  EXPECT_EQ(mask.digest(), set_up().problem.mask.digest());
  options_.block_mask = "random:1.5";
  EXPECT_THAT(error(), AllOf(HasSubstr("--block-mask random:1.5: got 1.5"), HasSubstr("0 to 1")));
  options_.block_mask = "random:x";
  EXPECT_THAT(error(), HasSubstr("--block-mask random:x: got 'x'"));
}

TEST_F(ProblemSetupTest, MaskTensorsOfTheInputFileCount) {
  options_.input = write("in.safetensors", "kv_lengths", {2}, {3, 6});
  EXPECT_FALSE(visible(set_up(), 0, 0, 3));
  options_.input = write_floats("in.safetensors", "bias", {6}, {0, 1, 2, 3, 4, 5});
  EXPECT_EQ(set_up().problem.bias, (Extents{1, 1, 1, 6}));
}

TEST_F(ProblemSetupTest, Sinks) {
  options_.sinks = write_floats("sinks.npy", "", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_THAT(set_up().problem.sinks->of_head(3), ElementsAre(7, 8));
  options_.sinks = write_floats("sinks.npy", "", {3}, {1, 2, 3});
  EXPECT_THAT(set_up().problem.sinks->of_head(2), ElementsAre(1, 2, 3));
  options_.sinks.clear();
  EXPECT_FALSE(set_up().problem.sinks.has_value());
  options_.input = write_floats("in.safetensors", "sinks", {4, 1}, {1, 2, 3, 4});
  EXPECT_THAT(set_up().problem.sinks->of_head(1), ElementsAre(2));
}

TEST_F(ProblemSetupTest, SinkErrors) {
  options_.sinks = write_floats("sinks.npy", "", {2, 2}, {1, 2, 3, 4});
  EXPECT_THAT(error(), AllOf(HasSubstr("--sinks"), HasSubstr("sinks.npy"), HasSubstr("[2, 2]"),
                             HasSubstr("N = 4 query heads")));
  options_.sinks = write_floats("sinks.npy", "", {1, 4, 1}, {1, 2, 3, 4});
  EXPECT_THAT(error(), AllOf(HasSubstr("sinks.npy"), HasSubstr("[N,M] or [M]")));
  options_.sinks = write_floats("sinks.npy", "", {2}, {1, INFINITY});
  EXPECT_THAT(error(), AllOf(HasSubstr("sinks.npy"), HasSubstr("inf at index 1")));
  options_.sinks = write("sinks.npy", {4}, {1, 2, 3, 4});
  EXPECT_THAT(error(), AllOf(HasSubstr("sinks.npy"), HasSubstr("int32"), HasSubstr("float32")));
  options_.sinks = path("missing.npy");
  EXPECT_THAT(error(), HasSubstr("missing.npy"));
}

// Shape and entries, in parts as a rank holds them.
TEST_F(ProblemSetupTest, Bias) {
  std::vector<float> entries(4 * 6);
  for (std::size_t i = 0; i < entries.size(); ++i) entries[i] = static_cast<float>(i);
  options_.bias = write_floats("bias.npy", "", {4, 1, 6}, entries);
  const ProblemSetup setup = set_up();
  EXPECT_EQ(setup.problem.bias, (Extents{1, 4, 1, 6}));
  std::vector<float> part(4);
  const std::vector<PositionRanges> index{
      PositionRanges::all(1), PositionRanges({{GlobalPosition(2), 2, 1}}), PositionRanges::all(1),
      PositionRanges({{GlobalPosition(1), 2, 3}})};
  setup.fills.bias({part.data(), DType::float32, {1, 2, 1, 2}}, index);
  EXPECT_THAT(part, ElementsAre(13, 16, 19, 22));
}

TEST_F(ProblemSetupTest, ABiasWithoutDimensionsIsOneNumber) {
  options_.bias = write_floats("bias.npy", "", Extents{}, {3});
  const ProblemSetup setup = set_up();
  EXPECT_EQ(setup.problem.bias, (Extents{1, 1, 1, 1}));
  float part = 0;
  setup.fills.bias({&part, DType::float32, {1, 1, 1, 1}}, files::whole({1, 1, 1, 1}));
  EXPECT_EQ(part, 3);
}

TEST_F(ProblemSetupTest, DenseMask) {
  options_.mask = write_bytes("mask.npy", {1, 6}, {1, 0, 1, 0, 0, 1});
  const ProblemSetup setup = set_up();
  EXPECT_EQ(setup.problem.dense_mask, (Extents{1, 1, 1, 6}));
  std::vector<std::uint8_t> part(6);
  const std::vector<PositionRanges> index = files::whole({1, 1, 1, 6});
  setup.fills.mask({part.data(), DType::boolean, {1, 1, 1, 6}}, index);
  EXPECT_THAT(part, ElementsAre(1, 0, 1, 0, 0, 1));
  // The entry that is wrong is named by its place in the file, of which a rank reads a part.
  options_.mask = write_bytes("mask.npy", {2, 1, 1, 6}, {1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 2, 1});
  const ProblemSetup wrong = set_up();
  const std::vector<PositionRanges> last{PositionRanges({{GlobalPosition(1), 1, 1}}), index[1],
                                         index[2], PositionRanges({{GlobalPosition(3), 3, 1}})};
  EXPECT_THAT(
      test::message_of<UserError>([&] {
        wrong.fills.mask({part.data(), DType::boolean, {1, 1, 1, 3}}, last);
      }),
      HasSubstr("--mask " + path("mask.npy") + ", entry 1, 0, 0, 4: got 2, expected 0 or 1"));
}

TEST_F(ProblemSetupTest, BiasAndMaskErrors) {
  const std::vector<float> numbers(4 * 6);
  options_.bias = write_floats("bias.npy", "", {2, 6}, std::vector<float>(12));
  EXPECT_THAT(error(), AllOf(HasSubstr("--bias"), HasSubstr("bias.npy"), HasSubstr("[1, 1, 2, 6]"),
                             HasSubstr("[B,N,T,S] = [2, 4, 6, 6]")));
  options_.bias = write_floats("bias.npy", "", {1, 1, 4, 1, 6}, numbers);
  EXPECT_THAT(error(), AllOf(HasSubstr("bias.npy"), HasSubstr("[1, 1, 4, 1, 6]")));
  options_.bias = write("bias.npy", {6}, {1, 2, 3, 4, 5, 6});
  EXPECT_THAT(error(), AllOf(HasSubstr("bias.npy"), HasSubstr("int32"), HasSubstr("float32")));
  options_.bias = path("missing.npy");
  EXPECT_THAT(error(), HasSubstr("missing.npy"));
  options_.bias.clear();
  options_.bias_policy = BiasPolicy::bias_wins;
  EXPECT_NO_THROW(set_up()) << "meant for other problems, unless it is on the command line";
  options_.named = {"bias-policy"};
  EXPECT_THAT(error(), AllOf(HasSubstr("--bias-policy"), HasSubstr("no bias")));
  options_.named.clear();
  options_.bias_policy = BiasPolicy::combine;
  options_.mask = write_bytes("mask.npy", {5}, {1, 0, 1, 0, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("--mask"), HasSubstr("[1, 1, 1, 5]")));
  options_.mask = write_floats("mask.npy", "", {6}, {1, 0, 1, 0, 1, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("mask.npy"), HasSubstr("float32"), HasSubstr("bool")));
  options_.mask = "random:2";
  EXPECT_THAT(error(), AllOf(HasSubstr("--mask random:2: got 2"), HasSubstr("0 to 1")));
  options_.mask = "random:x";
  EXPECT_THAT(error(), HasSubstr("--mask random:x: got 'x'"));
  options_.mask.clear();
  options_.bias = "random:-1";
  EXPECT_THAT(error(), AllOf(HasSubstr("--bias random:-1: got '-1'"), HasSubstr("0 or more")));
}

TEST_F(ProblemSetupTest, SpecsOfBiasAndMaskFollowTheQuery) {
  options_.mesh = "dp=2,sp=2,tp=2,one=1";
  options_.bias = "random:1";    // [1,N,T,S]
  options_.mask = "random:0.5";  // [B,1,T,S]
  const ring::ShardedOperands operands = shard_operands(set_up(8));
  EXPECT_EQ(operands.bias->spec(), PartitionSpec::parse("-,tp,sp"));
  EXPECT_EQ(operands.dense_mask->spec(), PartitionSpec::parse("dp,-,sp"));
  EXPECT_EQ(operands.bias->global_shape(), (Extents{1, 4, 6, 6}));
  EXPECT_EQ(operands.dense_mask->global_shape(), (Extents{2, 1, 6, 6}));
  EXPECT_EQ(operands.bias->local_shape(0), (Extents{1, 2, 3, 6}));
  EXPECT_EQ(operands.dense_mask->local_shape(0), (Extents{1, 1, 3, 6}));
  options_.bias_policy = BiasPolicy::bias_wins;  // which leaves the mask out
  EXPECT_FALSE(shard_operands(set_up(8)).dense_mask);
}

TEST_F(ProblemSetupTest, BiasPolicies) {
  options_.causal = true;
  options_.window = WindowSize{3, 0};
  options_.mask = "random:0.5";
  options_.bias = "random:1";
  EXPECT_TRUE(set_up().problem.mask.causal());
  options_.bias_policy = BiasPolicy::bias_disables_causal;
  AttentionProblem problem = set_up().problem;
  EXPECT_FALSE(problem.mask.causal());
  EXPECT_EQ(problem.mask.window_left(), 3);
  EXPECT_TRUE(problem.dense_mask);
  options_.bias_policy = BiasPolicy::bias_wins;
  problem = set_up().problem;
  EXPECT_FALSE(problem.mask.hides_any());
  EXPECT_FALSE(problem.dense_mask);
  EXPECT_EQ(set_up().layout.sequence, LayoutKind::contiguous);  // no diagonal is left
}

TEST_F(ProblemSetupTest, RandomSinks) {
  options_.sinks = "random:3";
  EXPECT_EQ(set_up().problem.sinks->shape(), (Extents{4, 3}));
  EXPECT_EQ(set_up().problem.sinks, set_up().problem.sinks);
  options_.sinks = "random:0";
  EXPECT_THAT(error(), HasSubstr("--sinks random:0: got '0'"));
  options_.sinks = "random:x";
  EXPECT_THAT(error(), HasSubstr("--sinks random:x: got 'x'"));
}

}  // namespace
}  // namespace annulus::launcher
