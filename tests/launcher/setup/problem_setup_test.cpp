#include "launcher/setup/problem_setup.hpp"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/group.hpp>

#include "tests/support/message_of.hpp"

namespace annulus::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Ids = std::vector<std::int32_t>;

class ProblemSetupTest : public ::testing::Test {
 protected:
  ProblemSetupTest()
      : directory_(std::filesystem::path(::testing::TempDir()) /
                   ("annulus_setup_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(directory_);
  }
  ~ProblemSetupTest() override { std::filesystem::remove_all(directory_); }

  [[nodiscard]] std::string path(const std::string& name) const { return directory_ / name; }

  /// Writes arrays of int32 to a file and gives its path.
  std::string write(const std::string& name, const std::string& tensor, const Extents& shape,
                    Ids values) {
    const std::shared_ptr<Control> group = make_self_group()->shared_control();
    files::ArrayWriter writer(*group, path(name), {{tensor, DType::int32, shape}});
    writer.write_slice(files::whole(shape), TensorView(values.data(), DType::int32, shape));
    writer.commit();
    return path(name);
  }
  std::string write_bytes(const std::string& name, const Extents& shape,
                          std::vector<std::uint8_t> values) {
    const std::shared_ptr<Control> group = make_self_group()->shared_control();
    files::ArrayWriter writer(*group, path(name), {{"", DType::uint8, shape}});
    writer.write_slice(files::whole(shape), TensorView(values.data(), DType::uint8, shape));
    writer.commit();
    return path(name);
  }
  std::string write_floats(const std::string& name, const std::string& tensor, const Extents& shape,
                           std::vector<float> values) {
    const std::shared_ptr<Control> group = make_self_group()->shared_control();
    files::ArrayWriter writer(*group, path(name), {{tensor, DType::float32, shape}});
    writer.write_slice(files::whole(shape), TensorView(values.data(), DType::float32, shape));
    writer.commit();
    return path(name);
  }
  std::string write(const std::string& name, const Extents& shape, const Ids& values) {
    return write(name, "", shape, values);
  }

  [[nodiscard]] ProblemSetup set_up(int ranks = 4) const {
    return set_up_problem(options_, shape_, DType::float32, ranks);
  }
  [[nodiscard]] std::string error(int ranks = 4) const {
    try {
      static_cast<void>(set_up(ranks));
    } catch (const UserError& error) {
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
  }
  /// True if query `row` sees key `column` of a batch.
  [[nodiscard]] static bool visible(const ProblemSetup& setup, std::int64_t batch, std::int64_t row,
                                    std::int64_t column) {
    return setup.problem.mask.visible(batch, 0, GlobalPosition(row), GlobalPosition(column));
  }

  std::filesystem::path directory_;
  Options options_;
  AttentionShape shape_{.batch = 2,
                        .query_length = 6,
                        .kv_length = 6,
                        .heads = 4,
                        .kv_heads = 2,
                        .head_dim = 8,
                        .value_dim = 8};
};

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
}

TEST_F(ProblemSetupTest, WithoutRanksTheMeshMustBeGiven) {
  EXPECT_THAT(error(0), HasSubstr("--mesh: got nothing"));
  options_.mesh = "sp=-1";
  EXPECT_THAT(error(0), HasSubstr("--mesh"));
  options_.mesh = "sp=1000";
  EXPECT_EQ(set_up(0).mesh.ranks(), 1000);
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

TEST_F(ProblemSetupTest, WarnsOfHeadsAndPositionsThatLookSwapped) {
  options_.command = Command::run;
  shape_.heads = shape_.kv_heads = 4096;
  shape_.query_length = shape_.kv_length = 32;
  EXPECT_THAT(set_up().warnings, ElementsAre(HasSubstr("--layout bhtd")));
  options_.bhtd = true;
  EXPECT_THAT(set_up().warnings, ElementsAre(HasSubstr("--layout bthd")));
  options_.command = Command::plan;  // where no file is read
  EXPECT_THAT(set_up().warnings, IsEmpty());
  options_.command = Command::run;
  shape_.query_length = 1;  // decoding
  EXPECT_THAT(set_up().warnings, IsEmpty());
  shape_.query_length = 32;
  shape_.kv_length = 10000;
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
  const std::vector<PositionRanges> index(4, PositionRanges::all(1));
  setup.fills.bias({&part, DType::float32, {1, 1, 1, 1}}, index);
  EXPECT_EQ(part, 3);
}

TEST_F(ProblemSetupTest, DenseMask) {
  options_.mask = write_bytes("mask.npy", {1, 6}, {1, 0, 1, 0, 0, 1});
  const ProblemSetup setup = set_up();
  EXPECT_EQ(setup.problem.dense_mask, (Extents{1, 1, 1, 6}));
  std::vector<std::uint8_t> part(6);
  const std::vector<PositionRanges> index{PositionRanges::all(1), PositionRanges::all(1),
                                          PositionRanges::all(1), PositionRanges::all(6)};
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
  EXPECT_THAT(error(), AllOf(HasSubstr("--bias random:-1: got -1"), HasSubstr("0 or more")));
}

TEST_F(ProblemSetupTest, SpecsOfBiasAndMaskFollowTheQuery) {
  options_.mesh = "dp=2,sp=2,tp=2,one=1";
  options_.bias = "random:1";    // [1,N,T,S]
  options_.mask = "random:0.5";  // [B,1,T,S]
  options_.bias_spec = "-,tp,sp,-";
  options_.mask_spec = "dp,-,sp";
  const ring::ShardedOperands operands = shard_operands(set_up(8));
  EXPECT_EQ(operands.bias->spec(), PartitionSpec::parse("-,tp,sp"));
  EXPECT_EQ(operands.dense_mask->spec(), PartitionSpec::parse("dp,-,sp"));
  EXPECT_EQ(operands.bias->local_shape(0), (Extents{1, 2, 3, 6}));
  EXPECT_EQ(operands.dense_mask->local_shape(0), (Extents{1, 1, 3, 6}));
  options_.bias_spec = "one,tp,sp,-";  // an axis of size 1 shards nothing
  EXPECT_EQ(shard_operands(set_up(8)).bias->spec(), PartitionSpec::parse("-,tp,sp"));
}

TEST_F(ProblemSetupTest, OtherSpecsOfBiasAndMaskAreErrors) {
  options_.mesh = "dp=2,sp=2,tp=2";
  options_.bias = "random:1";
  const auto refusal = [&] {
    return test::message_of<UserError>([&] { static_cast<void>(shard_operands(set_up(8))); });
  };
  for (const char* spec : {"-,tp,-,sp", "dp,tp,sp,-", "-,-,sp,-", "-,tp,sp,-,-,dp", "-,sp,tp"}) {
    options_.bias_spec = spec;
    EXPECT_THAT(refusal(), AllOf(StartsWith("--bias-spec: got " + std::string(spec)),
                                 HasSubstr("expected -,tp,sp,-: ")));
  }
  options_.bias_spec = "-,tp,sp,x";
  EXPECT_THAT(refusal(), StartsWith("--bias-spec: unknown mesh axis 'x'"));
  options_.bias_spec.reset();
  options_.mask_spec = "-,-,sp,-";
  EXPECT_NO_THROW(set_up(8)) << "meant for other problems, unless it is on the command line";
  options_.named = {"mask-spec"};
  EXPECT_THAT(refusal(), StartsWith("--mask-spec -,-,sp,-: there is no dense mask"));
  options_.mask = "random:0.5";
  EXPECT_THAT(refusal(), AllOf(StartsWith("--mask-spec: got -,-,sp,-"), HasSubstr("dp,-,sp,-")));
  options_.bias_policy = BiasPolicy::bias_wins;  // which leaves the mask out
  EXPECT_FALSE(shard_operands(set_up(8)).dense_mask);
  options_.bias_policy = BiasPolicy::combine;
  options_.mask.clear();
  options_.mask_spec.reset();
  options_.bias.clear();
  options_.bias_spec = "-";
  options_.named.clear();
  EXPECT_NO_THROW(set_up(8));
  options_.named = {"bias-spec"};
  EXPECT_THAT(refusal(), StartsWith("--bias-spec -: there is no bias"));
}

TEST_F(ProblemSetupTest, RandomBiasAndMask) {
  options_.bias = "random:2";
  options_.mask = "random:0.5";
  EXPECT_EQ(set_up().problem.bias, (Extents{1, 4, 6, 6}));
  EXPECT_EQ(set_up().problem.dense_mask, (Extents{2, 1, 6, 6}));
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
