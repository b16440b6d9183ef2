// Warnings about legal options that are probably mistakes: files in another order, options without
// effect.
#include "launcher/setup/hints.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/setup/input_tensors.hpp"
#include "tests/launcher/setup/problem_setup_fixture.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// The hints of run with --layout; without it, the same text is an error.
std::vector<std::string> of_run(const AttentionShape& shape, bool bhtd = false) {
  Options options;
  options.command = Command::run;
  options.bhtd = bhtd;
  const auto of_options = [&] { return hints(options, shape, MeshShape({{"sp", 1}}), {}); };
  const std::string error = test::message_of<UserError>([&] { static_cast<void>(of_options()); });
  options.given_values = {{"layout", "bthd"}};
  std::vector<std::string> all = of_options();
  if (all.empty()) {
    EXPECT_EQ(error, "nothing thrown");
  } else {
    EXPECT_THAT(error, AllOf(HasSubstr(all.front()), HasSubstr("(--layout bthd takes")));
  }
  return all;
}

TEST(Hints, HeadsAndPositionsThatLookSwapped) {
  const auto swapped = HasSubstr("look swapped: files of [B,N,T,D] need --layout bhtd");
  EXPECT_THAT(of_run({1, 8, 2, 1024, 1024, 64, 64}), ElementsAre(swapped));
  EXPECT_THAT(of_run({1, 8, 8, 100, 100, 64, 64}), ElementsAre(swapped));
  EXPECT_THAT(of_run({1, 32, 32, 4096, 4096, 64, 64}, /*bhtd=*/true),
              ElementsAre(HasSubstr("files of [B,T,N,D] need --layout bthd")));
  // The query alone.
  EXPECT_THAT(of_run({1, 8, 1024, 1024, 2, 64, 64}),
              ElementsAre(HasSubstr("1024 heads and 8 positions of query look swapped, unlike 2 "
                                    "heads and 1024 positions of key")));
  EXPECT_THAT(of_run({1, 8, 128, 128, 2, 64, 64}), ElementsAre(HasSubstr("unlike 2 heads")));
  // Decoding, and a chunk of a prompt against a cache.
  EXPECT_THAT(of_run({1, 1, 4096, 64, 8, 128, 128}), IsEmpty());
  EXPECT_THAT(of_run({1, 16, 4096, 64, 8, 128, 128}), IsEmpty());
  EXPECT_THAT(of_run({1, 1, 64, 64, 8, 128, 128}), IsEmpty());
  EXPECT_THAT(of_run({1, 256, 256, 256, 256, 64, 64}), IsEmpty());
  EXPECT_THAT(of_run({1, 32, 10000, 128, 128, 64, 64}), IsEmpty());
}

TEST(Hints, MoreHeadsInAShapeThanInAnyModel) {
  for (const Command command : {Command::plan, Command::bench, Command::verify}) {
    Options options;
    options.command = command;
    const auto of = [&](const AttentionShape& shape) {
      return hints(options, shape, MeshShape({{"sp", 1}}), {});
    };
    EXPECT_THAT(of({1, 64, 64, 4096, 4096, 128, 128}),
                ElementsAre(HasSubstr("the order is B,T,S,N,K,D")));
    EXPECT_THAT(of({1, 64, 64, 256, 8, 128, 128}), IsEmpty());
  }
}

TEST(Hints, GranulesThatDoNotReachAllRanks) {
  ring::OperandLayout layout;
  layout.query = PartitionSpec::parse("-,sp");
  const auto of = [&](std::int64_t granule) {
    layout.granule = granule;
    return hints({}, {1, 1000, 1000, 4, 4, 64, 64}, MeshShape({{"sp", 4}}), layout);
  };
  EXPECT_THAT(of(250), IsEmpty());
  EXPECT_THAT(of(500), ElementsAre(HasSubstr("--granule 500: 1000 positions of query have 2 "
                                             "granules for 4 ranks")));
}

TEST(Hints, OptionsThatTheChoiceLeavesWithoutEffect) {
  using ring::Schedule;
  Options options;
  EXPECT_THAT(hints_of_choice(options, {Schedule::ring}), IsEmpty());
  options.named = {"ulysses-degree", "inner-size", "grad-wire"};
  options.ulysses_degree = 2;
  options.inner_size = 4;
  options.grad_wire = DType::bfloat16;
  EXPECT_THAT(
      hints_of_choice(options, {Schedule::ring, Schedule::local}, false),
      ElementsAre(HasSubstr("--ulysses-degree 2: has no effect: --schedule auto has chosen ring "
                            "and local; only hybrid uses it"),
                  HasSubstr("--inner-size 4: has no effect"),
                  HasSubstr("--grad-wire bfloat16: has no effect")));
  EXPECT_THAT(hints_of_choice(options, {Schedule::hybrid, Schedule::double_ring}, true), IsEmpty());
  options.schedule = "ring";  // such options are refused beforehand
  EXPECT_THAT(hints_of_choice(options, {Schedule::ring}), IsEmpty());
}

/// Files of tensors whose shapes need not fit.
class OrderOfFiles : public ProblemSetupTest {
 protected:
  std::string write_zeros(const std::string& name, const Extents& shape,
                          DType dtype = DType::float32) {
    const std::vector<double> zeros(static_cast<std::size_t>(shape.product()));
    return write_array(name, "", dtype, shape, zeros.data());
  }
  void write_shapes(const Extents& query, const Extents& key) {
    options_.command = Command::run;
    options_.query = write_zeros("q.npy", query);
    options_.key = options_.value = write_zeros("k.npy", key);
  }
  [[nodiscard]] std::string error() const {
    return test::message_of<UserError>([&] { static_cast<void>(open_inputs(options_)); });
  }
};

TEST_F(OrderOfFiles, AHintNeedsOneReadingThatMakesSense) {
  write_shapes({1, 8, 512, 4}, {1, 2, 512, 4});
  EXPECT_EQ(error(), "nothing thrown");  // hints() warns: 512 heads
  // A decoding step, with heads before positions.
  write_shapes({1, 16, 1, 4}, {1, 2, 512, 4});
  EXPECT_THAT(error(), HasSubstr("(with --layout bhtd they fit each other)"));
  // The key alone is swapped: as bhtd, the query would have 1024 heads.
  write_shapes({1, 1024, 8, 4}, {1, 2, 1024, 4});
  EXPECT_THAT(error(), AllOf(HasSubstr("heads K is 1024"),
                             HasSubstr("(key and value seem to be in the order bhtd"),
                             Not(HasSubstr("with --layout"))));
  // Either way makes sense.
  write_shapes({1, 128, 8, 4}, {1, 2, 128, 4});
  EXPECT_THAT(error(), AllOf(HasSubstr("heads K is 128"), Not(HasSubstr("order")),
                             Not(HasSubstr("--layout"))));
}

TEST_F(OrderOfFiles, SizesThatDoNotFitAreNamed) {
  const auto with_key = [&](const Extents& shape) {
    write_shapes({1, 64, 4, 16}, {1, 64, 2, 16});
    options_.key = write_zeros("key.npy", shape);
    return error();
  };
  EXPECT_THAT(with_key({2, 64, 2, 16}), HasSubstr("key.npy: key: batch B is 2"));
  EXPECT_THAT(with_key({1, 64, 2, 8}), HasSubstr("head dimension D is 8"));
  EXPECT_THAT(with_key({1, 64, 3, 16}), HasSubstr("heads K is 3"));
  EXPECT_THAT(with_key({64, 2, 16}), HasSubstr("4 dimensions"));
  EXPECT_THAT(with_key({1, 63, 2, 16}), HasSubstr("key.npy: key: length S is 63"));
  const auto with_value = [&](const Extents& shape) {
    write_shapes({1, 64, 4, 16}, {1, 64, 2, 16});
    options_.value = write_zeros("value.npy", shape);
    return error();
  };
  EXPECT_THAT(with_value({2, 64, 2, 16}), HasSubstr("value.npy: value: batch B is 2"));
  EXPECT_THAT(with_value({1, 63, 2, 16}), HasSubstr("value.npy: value: length S is 63"));
  EXPECT_THAT(with_value({1, 64, 1, 16}), HasSubstr("heads K is 1"));
}

TEST_F(OrderOfFiles, DtypesThatDoNotFitAreNamed) {
  write_shapes({1, 64, 4, 16}, {1, 64, 2, 16});
  options_.key = write_zeros("key.npy", {1, 64, 2, 16}, DType::float16);
  EXPECT_THAT(error(), HasSubstr("key.npy: key: float16, expected float32 as query has"));
  options_.key = options_.value;
  options_.dtype = DType::float16;
  EXPECT_THAT(error(), HasSubstr("q.npy: dtype float32, expected float16"));
  options_.dtype.reset();
  options_.query = write_zeros("query.npy", {1, 64, 4, 16}, DType::int32);
  EXPECT_THAT(error(), HasSubstr("query.npy: dtype int32, expected float32, float16"));
  options_.query = write_zeros("query.npy", {1, 64, 4, 16}, DType::bfloat16);
  EXPECT_THAT(error(), AllOf(HasSubstr("dtype '<u2'"), HasSubstr("--dtype bfloat16")));
}

TEST_F(OrderOfFiles, TensorsAreTheModels) {
  write_shapes({1, 16, 8, 4}, {1, 16, 2, 4});
  options_.model_config = "config.json";
  options_.model_sizes = {8, 2, 4};
  EXPECT_EQ(error(), "nothing thrown");
  options_.model_sizes = {8, 4, 4};
  EXPECT_THAT(error(), HasSubstr("--query/--key: got N=8 K=2 D=4, expected N=8 K=4 D=4 as in "
                                 "--model-config config.json"));
}

}  // namespace
}  // namespace annulus::launcher
