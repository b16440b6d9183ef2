// Meshes, layouts, and masks by positions and documents.
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
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(ProblemSetupTest, AllRanksGoOnTheSequenceByDefault) {
  const ProblemSetup setup = set_up();
  EXPECT_EQ(to_string(setup.mesh), "sp=4");
  EXPECT_EQ(to_string(setup.layout.query), "-,sp,-,-");
  EXPECT_EQ(to_string(setup.layout.kv), "-,sp,-,-");
  EXPECT_FALSE(setup.problem.mask.causal());
  EXPECT_EQ(setup.problem.shape, shape_);
}

TEST_F(ProblemSetupTest, SpecsComeFromTheRulesForTheMesh) {
  options_.mesh = "dp=2,sp=-1,tp=2";
  const ProblemSetup setup = set_up(8);
  EXPECT_EQ(to_string(setup.mesh), "dp=2,sp=2,tp=2");
  EXPECT_EQ(to_string(setup.layout.query), "dp,sp,tp,-");
  EXPECT_EQ(to_string(setup.layout.kv), "dp,sp,tp,-");
}

TEST_F(ProblemSetupTest, GivenSpecsWin) {
  options_.mesh = "x=2,y=2";
  options_.query_spec = "x,-,-,-";
  options_.kv_spec = "x,y";
  const ProblemSetup setup = set_up();
  EXPECT_EQ(to_string(setup.layout.query), "x,-,-,-");
  EXPECT_EQ(to_string(setup.layout.kv), "x,y");
}

TEST_F(ProblemSetupTest, AnUnknownAxisIsBlamedOnItsOwnSpec) {
  options_.query_spec = "dp,sp";  // key/value has the default spec
  EXPECT_THAT(error(), AllOf(StartsWith("--query-spec: unknown mesh axis 'dp'"), HasSubstr("sp")));
  options_.query_spec.reset();
  options_.kv_spec = "-,x";
  EXPECT_THAT(error(), StartsWith("--kv-spec: unknown mesh axis 'x'"));
  options_.kv_spec = "sp";
  EXPECT_THAT(test::message_of<UserError>([&] { static_cast<void>(shard_operands(set_up())); }),
              HasSubstr("batch: got - and sp, expected the same axes"));
}

// Wherever sizes come from, their products must not overflow.
TEST_F(ProblemSetupTest, ShapesBeyond64BitsAreRefused) {
  for (const auto& [shape, expected] :
       {std::pair(AttentionShape{1LL << 32, 1LL << 32, 1LL << 32, 1, 1, 1, 1}, "2^60 elements"),
        std::pair(AttentionShape{1LL << 28, 1 << 20, 1 << 20, 1024, 1024, 64, 64}, "2^60 elements"),
        std::pair(AttentionShape{1, 1LL << 34, 1LL << 34, 64, 8, 128, 128}, "2^62 pairs")}) {
    options_.shape = shape_ = shape;
    options_.cu_seqlens = path("missing.npy");  // not read for such a shape
    EXPECT_THAT(error(), AllOf(StartsWith("--shape: got B="), HasSubstr(expected)));
  }
}

TEST_F(ProblemSetupTest, WhatHasNoGradientsIsRefused) {
  options_.grad_output = "g.npy";
  options_.grad_wire = DType::bfloat16;
  EXPECT_THAT(error(), StartsWith("--grad-wire bfloat16: gradients of float32 are not rounded"));
  options_.grad_wire = DType::float32;
  options_.normalize_output = false;
  EXPECT_THAT(error(), AllOf(StartsWith("--normalize-output false: "), HasSubstr("--grad-output")));
}

TEST_F(ProblemSetupTest, AnUnknownAxisOfARuleIsBlamedOnTheRule) {
  options_.rules.set({SemanticAxis::batch, std::nullopt, {}});
  options_.rules.set({SemanticAxis::head, std::nullopt, {"tp"}});
  EXPECT_THAT(error(), StartsWith("--sharding-rules, entry 'head': unknown mesh axis 'tp'"));
}

TEST_F(ProblemSetupTest, WithoutRanksTheMeshMustBeGiven) {
  EXPECT_THAT(error(0), HasSubstr("--mesh: got nothing"));
  options_.mesh = "sp=-1";
  EXPECT_THAT(error(0), HasSubstr("--mesh"));
  options_.mesh = "sp=1000";
  EXPECT_EQ(set_up(0).mesh.ranks(), 1000);
  options_.mesh = "sp=2000000000";
  EXPECT_THAT(error(0), AllOf(HasSubstr("--mesh: got 2000000000 ranks"), HasSubstr("65536 ranks")));
}

TEST_F(ProblemSetupTest, MeshErrorsNameTheOption) {
  options_.mesh = "sp=3";
  EXPECT_THAT(error(), AllOf(HasSubstr("--mesh"), HasSubstr("sp=3"), HasSubstr("4")));
}

TEST_F(ProblemSetupTest, AMeshOfAnotherSizeComesWithTheCommandThatHasIt) {
  options_.command = Command::verify;
  options_.mesh = "sp=4,tp=2";
  EXPECT_THAT(error(2), HasSubstr("mpirun -n 8 annulus verify ..."));
  options_.mesh = "sp=-1,tp=3";  // any multiple of three
  EXPECT_THAT(error(2), AllOf(HasSubstr("--mesh"), Not(HasSubstr("mpirun"))));
  options_.mesh = "sp=x";
  EXPECT_THAT(error(2), AllOf(HasSubstr("--mesh"), Not(HasSubstr("mpirun"))));
}

TEST_F(ProblemSetupTest, WarnsOfACausalMaskThatHidesTheLastKeys) {
  options_.causal = true;
  EXPECT_THAT(set_up().warnings, IsEmpty()) << "T = S";
  shape_.kv_length = 10;
  EXPECT_THAT(set_up().warnings, ElementsAre(AllOf(HasSubstr("T = 6"), HasSubstr("S = 10"),
                                                   HasSubstr("--causal-offset bottom-right"))));
  options_.causal_offset = CausalOffset{};
  EXPECT_THAT(set_up().warnings, IsEmpty()) << "meant as it is";
  options_.causal_offset.reset();
  shape_.kv_length = 5;
  EXPECT_THAT(set_up().warnings, IsEmpty()) << "more queries than keys";
  options_.causal = false;
  shape_.kv_length = 10;
  EXPECT_THAT(set_up().warnings, IsEmpty());
}

TEST_F(ProblemSetupTest, WarnsOfAnAxisThatShardsNothing) {
  options_.mesh = "sp=2,ps=2,one=1";
  EXPECT_THAT(set_up().warnings, ElementsAre(AllOf(HasSubstr("mesh axis ps"), HasSubstr("2 ranks"),
                                                   HasSubstr("--query-spec=-,ps"))));
  options_.query_spec = options_.kv_spec = "ps,sp";
  EXPECT_THAT(set_up().warnings, IsEmpty());
}

TEST_F(ProblemSetupTest, LayoutFollowsTheMask) {
  EXPECT_EQ(set_up().layout.sequence, LayoutKind::contiguous);
  options_.causal = true;
  EXPECT_EQ(set_up().layout.sequence, LayoutKind::zigzag);
  EXPECT_EQ(set_up(1).layout.sequence, LayoutKind::contiguous) << "nothing is sharded";
  options_.sequence_layout = "striped";
  EXPECT_EQ(set_up().layout.sequence, LayoutKind::striped);
  options_.sequence_layout = "balanced";
  const ProblemSetup setup = set_up();
  EXPECT_EQ(setup.layout.sequence, LayoutKind::balanced);
  EXPECT_EQ(shard_operands(setup).query.distribution(1).kind(), Distribution::Kind::assigned);
}

TEST_F(ProblemSetupTest, KeysMayLieOtherwise) {
  options_.sequence_layout = "striped";
  EXPECT_EQ(ring::layout_text(set_up().layout), "striped");
  options_.kv_sequence_layout = "contiguous";
  const ProblemSetup setup = set_up();
  EXPECT_EQ(ring::layout_text(setup.layout), "striped,contiguous");
  const ring::ShardedOperands operands = shard_operands(setup);
  EXPECT_EQ(operands.query.distribution(1).layout(), LayoutKind::striped);
  EXPECT_EQ(operands.output.distribution(1).layout(), LayoutKind::striped);
  EXPECT_EQ(operands.lse.distribution(2).layout(), LayoutKind::striped);
  EXPECT_EQ(operands.key.distribution(1).layout(), LayoutKind::contiguous);
  EXPECT_EQ(operands.value.distribution(1).layout(), LayoutKind::contiguous);
}

TEST_F(ProblemSetupTest, AGranuleIsOfBothSequences) {
  options_.sequence_layout = "zigzag";
  options_.kv_sequence_layout = "contiguous";
  options_.granule = 4;
  EXPECT_EQ(ring::layout_text(set_up().layout), "zigzag,contiguous:4");
  const ring::ShardedOperands operands = shard_operands(set_up());
  EXPECT_EQ(operands.query.distribution(1).granule(), 4);
  EXPECT_EQ(operands.value.distribution(1).granule(), 4);
  options_.kv_sequence_layout = "striped";
  EXPECT_THAT(test::message_of<UserError>([&] { static_cast<void>(shard_operands(set_up())); }),
              HasSubstr("--granule: got 4, expected 1 or none with the layout striped"));
}

TEST_F(ProblemSetupTest, BottomRightOffset) {
  shape_.kv_length = 10;
  options_.causal = true;
  options_.causal_offset = CausalOffset{true, 0, false, {}};
  EXPECT_EQ(set_up().problem.mask.offset(), 4);
  options_.causal_offset = CausalOffset{false, -2, false, {}};
  EXPECT_EQ(set_up().problem.mask.offset(), -2);
  options_.causal = false;
  EXPECT_FALSE(set_up().problem.mask.hides_any()) << "there is nothing to shift";
}

TEST_F(ProblemSetupTest, PartsOfPositions) {
  options_.causal = true;
  options_.prefix = SizeOrFile{3, {}};
  options_.sink_tokens = 2;
  options_.chunk = 4;
  const Mask numbers = set_up().problem.mask;
  EXPECT_EQ(numbers.prefix(), 3);
  EXPECT_EQ(numbers.position_parts().sink_tokens, 2);
  EXPECT_EQ(numbers.position_parts().chunk, 4);
  options_.prefix->file = write("prefix.npy", {2}, {5, 0});
  options_.causal_offset = CausalOffset{};
  options_.causal_offset->file = write("offset.npy", {2}, {-1, 4});
  const Mask by_batch = set_up().problem.mask;
  EXPECT_EQ(by_batch.prefixes(), (std::vector<std::int32_t>{5, 0}));
  EXPECT_EQ(by_batch.offsets(), (std::vector<std::int32_t>{-1, 4}));
  options_.prefix->file = write("prefix.npy", {2}, {5, -1});
  EXPECT_THAT(error(), AllOf(HasSubstr("--prefix"), HasSubstr("entry 1: got -1")));
  options_.prefix->file = write("prefix.npy", {3}, {5, 1, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("--prefix"), HasSubstr("expected [B] = [2]")));
}

TEST_F(ProblemSetupTest, TwoPackings) {
  shape_.kv_length = 10;
  options_.query_cu_seqlens = write("q.npy", {3}, {0, 2, 6});
  EXPECT_THAT(error(), HasSubstr("--cu-seqlens-kv: got nothing"));
  options_.kv_cu_seqlens = write("kv.npy", {3}, {0, 7, 10});
  EXPECT_FALSE(set_up().problem.mask.alignment()) << "nothing compares positions";
  options_.causal = true;
  EXPECT_THAT(error(),
              AllOf(HasSubstr("--causal-offset: got nothing"), HasSubstr("top-left or bottom-")));
  options_.causal_offset = CausalOffset{false, 3, false, {}};
  EXPECT_THAT(error(), HasSubstr("--causal-offset: got 3"));
  options_.causal_offset = CausalOffset{true, 0, false, {}};
  const Mask mask = set_up().problem.mask;
  EXPECT_EQ(mask.alignment(), DocumentAlignment::bottom_right);
  EXPECT_EQ(mask.offset(), 0);
  EXPECT_EQ(mask.kv_cu_seqlens(), (std::vector<std::int32_t>{0, 7, 10}));
  options_.kv_cu_seqlens = write("kv.npy", {3}, {0, 7, 9});
  EXPECT_THAT(error(), HasSubstr("entry 2: got 9, expected the sequence length 10"));
  options_.kv_cu_seqlens = write("kv.npy", {4}, {0, 7, 7, 10});
  EXPECT_THAT(error(), HasSubstr("as many as of queries: 2"));
  options_.kv_cu_seqlens = write("kv.npy", {3}, {0, 7, 10});
  options_.query_segments = write("ids.npy", {2, 6}, std::vector<std::int32_t>(12));
  EXPECT_THAT(error(), HasSubstr("--cu-seqlens-q"));
}

TEST_F(ProblemSetupTest, ScaleCapDropoutAndWindow) {
  options_.scale = 0.25;
  options_.soft_cap = 30;
  options_.dropout = 0.25;
  options_.seed = 9;
  options_.window = WindowSize{.left = 2, .right = -1};
  const AttentionProblem problem = set_up().problem;
  EXPECT_EQ(problem.scale, 0.25);
  EXPECT_EQ(problem.soft_cap, 30);
  EXPECT_EQ(problem.dropout, Dropout(0.25, 9));
  EXPECT_EQ(problem.mask.window_left(), 2);
  EXPECT_EQ(problem.mask.window_right(), -1);
}

TEST_F(ProblemSetupTest, PackedDocumentsBecomeTheSegmentsOfEveryBatchRow) {
  options_.cu_seqlens = write("cu.npy", {3}, {0, 2, 6});
  const ProblemSetup setup = set_up();
  for (const std::int64_t batch : {0, 1}) {
    EXPECT_TRUE(visible(setup, batch, 0, 1));
    EXPECT_FALSE(visible(setup, batch, 1, 2));
    EXPECT_TRUE(visible(setup, batch, 5, 2));
  }
}

TEST_F(ProblemSetupTest, PackingErrors) {
  options_.cu_seqlens = write("cu.npy", {3}, {0, 2, 5});
  EXPECT_THAT(error(), AllOf(HasSubstr("--cu-seqlens"), HasSubstr("cu.npy")));
  options_.cu_seqlens = write("cu.npy", {1, 3}, {0, 2, 6});
  EXPECT_THAT(error(), AllOf(HasSubstr("cu.npy"), HasSubstr("[1, 3]")));
  options_.cu_seqlens = write("cu.npy", {3}, {0, 2, 6});
  shape_.kv_length = 7;
  EXPECT_THAT(error(), AllOf(HasSubstr("--cu-seqlens"), HasSubstr("T = 6 and S = 7")));
  shape_.kv_length = 6;
  options_.query_segments = options_.kv_segments = write("ids.npy", {2, 6}, Ids(12, 0));
  EXPECT_THAT(error(), HasSubstr("--cu-seqlens"));
}

TEST_F(ProblemSetupTest, Segments) {
  shape_.kv_length = 3;
  options_.query_segments = write("q.npy", {2, 6}, {0, 0, 0, 1, 1, -1, 0, 0, 0, 0, 0, 0});
  EXPECT_THAT(error(), HasSubstr("--kv-segments: got nothing"));
  options_.kv_segments = write("kv.npy", {2, 3}, {0, 1, -1, 0, 0, 1});
  const ProblemSetup setup = set_up();
  EXPECT_TRUE(visible(setup, 0, 0, 0));
  EXPECT_FALSE(visible(setup, 0, 0, 1));
  EXPECT_TRUE(visible(setup, 0, 3, 1));
  EXPECT_FALSE(visible(setup, 0, 5, 2));
  EXPECT_TRUE(visible(setup, 1, 0, 1));
  options_.kv_segments = write("kv.npy", {3, 2}, {0, 1, -1, 0, 0, 1});
  EXPECT_THAT(error(), AllOf(HasSubstr("kv.npy"), HasSubstr("[3, 2]"), HasSubstr("[2, 3]")));
}

TEST_F(ProblemSetupTest, Lengths) {
  options_.kv_lengths = write("kv.npy", {2}, {3, 6});
  options_.query_lengths = write("q.npy", {2}, {6, 1});
  const ProblemSetup setup = set_up();
  EXPECT_FALSE(visible(setup, 0, 0, 3));
  EXPECT_TRUE(visible(setup, 0, 5, 2));
  EXPECT_FALSE(visible(setup, 1, 1, 0));
  options_.kv_lengths = write("kv.npy", {2}, {3, -1});
  EXPECT_THAT(error(), AllOf(HasSubstr("--kv-lengths"), HasSubstr("-1")));
  options_.kv_lengths = path("missing.npy");
  EXPECT_THAT(error(), HasSubstr("missing.npy"));
}

}  // namespace
}  // namespace annulus::launcher
