#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>

#include "tests/attention/problem_of.hpp"
#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

class FakeImplementation final : public Implementation {
 public:
  FakeImplementation(std::vector<std::string> names, std::string reason, std::string absence)
      : names_(std::move(names)), reason_(std::move(reason)), absence_(std::move(absence)) {}
  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return reason_.empty() ? Capability::yes() : Capability::no(reason_);
  }
  [[nodiscard]] Capability available(Place /*place*/) const override {
    return absence_.empty() ? Capability::yes() : Capability::no(absence_);
  }
  [[nodiscard]] double assumed_rate(const ProblemClass& /*problem*/,
                                    Place /*place*/) const override {
    return 1;
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& /*problem*/,
                                                    Device& /*device*/) const override {
    return nullptr;
  }

 private:
  std::vector<std::string> names_;
  std::string reason_;
  std::string absence_;
  Declaration declaration_{.features = {Feature::causal}};
};

std::unique_ptr<Implementation> fake(std::vector<std::string> names, std::string reason = "",
                                     std::string absence = "") {
  return std::make_unique<FakeImplementation>(std::move(names), std::move(reason),
                                              std::move(absence));
}

TEST(Registry, KnowsItsNamesInOrder) {
  EXPECT_THAT(Registry::standard().names(),
              ElementsAre("sdpa", "cudnn", "cuda_flash_attn2", "flash_attn2", "blocksparse",
                          "native", "vanilla", "ring", "autoregressive_decodeattn"));
}

TEST(Registry, AliasesAreTheSameImplementation) {
  const Registry registry = Registry::standard();
  EXPECT_EQ(&registry.get("sdpa"), &registry.get("cudnn"));
  EXPECT_EQ(&registry.get("sdpa"), &registry.get("cuda_flash_attn2"));
  EXPECT_NE(&registry.get("sdpa"), &registry.get("native"));
}

TEST(Registry, UnknownNamesListTheKnown) {
  const Registry registry = Registry::standard();
  for (const char* name : {"Native", "flash", ""}) {
    const std::string message = test::message_of<ArgumentError>([&] { (void)registry.get(name); });
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_THAT(message, HasSubstr("sdpa, cudnn, cuda_flash_attn2, flash_attn2, blocksparse, "
                                   "native"));
  }
}

TEST(Registry, NamesAreTakenOnce) {
  Registry registry;
  registry.add(fake({"one", "uno"}));
  EXPECT_THROW(registry.add(fake({"one"})), ArgumentError);
  EXPECT_THROW(registry.add(fake({"two", "uno"})), ArgumentError);
  EXPECT_THROW(registry.add(fake({"three", "three"})), ArgumentError);
  EXPECT_THROW(registry.add(fake({"auto"})), ArgumentError);
  EXPECT_THAT(registry.names(), ElementsAre("one", "uno"));
}

TEST(Registry, AutoTakesTheFirstThatCan) {
  Registry registry;
  registry.add(fake({"best", "alias"}, "too good"));
  registry.add(fake({"good"}));
  registry.add(fake({"worse"}));
  const Selection selection = registry.select("auto", {}, Place::host());
  EXPECT_EQ(selection.candidates.front(), &registry.get("good"));
  EXPECT_THAT(selection.passed_over,
              ElementsAre(std::pair<std::string, std::string>("best", "too good")));
  EXPECT_EQ(registry.select("worse", {}, Place::host()).candidates.front(), &registry.get("worse"));
}

TEST(Registry, AFeatureThatIsNotDeclaredIsRefusedByName) {
  Registry registry;
  registry.add(fake({"plain"}));
  AttentionProblem problem;
  problem.mask.set_causal(true);
  EXPECT_TRUE(registry.get("plain").capability(problem, Place::host()));
  problem.soft_cap = 30.0;
  problem.mask.set_kv_lengths({1});
  EXPECT_EQ(registry.get("plain").capability(problem, Place::host()).reason(),
            "does not honour lengths, a soft cap");
  problem.soft_cap.reset();
  problem.mask = Mask();
  problem.mask.set_window(3, -1);
  EXPECT_EQ(registry.get("plain").capability(problem, Place::host()).reason(),
            "does not honour windows");
  problem.mask = Mask();
  problem.shape.query_length = problem.shape.kv_length = 2;
  problem.mask.set_segments(1, {0, 0}, {0, 0});
  EXPECT_EQ(registry.get("plain").capability(problem, Place::host()).reason(),
            "does not honour segment ids");
}

TEST(Features, OneThatNoListHasIsMissed) {
  constexpr auto kNew = static_cast<Feature>(20);
  const FeatureSet asked{Feature::causal, kNew};
  EXPECT_EQ(asked.missing_in(FeatureSet::all()), std::vector{kNew});
  EXPECT_FALSE(name_of(kNew).empty());
}

TEST(Registry, PlansForOtherMachinesAskForNoPresence) {
  Registry registry;
  registry.add(fake({"absent"}, "", "no such device"));
  const std::string message = test::message_of<UnsupportedError>(
      [&] { (void)registry.select("absent", {}, Place::host()); });
  EXPECT_THAT(message, HasSubstr("absent: no such device"));
  EXPECT_EQ(registry.select("auto", {}, Place::host(), Presence::assumed).candidates.size(), 1U);
  // The problems that cuDNN takes are known without it.
  AttentionProblem problem;
  problem.dtype = DType::bfloat16;
  problem.shape.head_dim = problem.shape.value_dim = 128;
  const Registry standard = Registry::standard();
  const auto planned = standard.select("auto", problem, Place::cuda(0), Presence::assumed);
  EXPECT_EQ(planned.candidates.front(), &standard.get("sdpa"));
  problem.soft_cap = 2.0;
  problem.dropout.emplace(0.1, 1);
  EXPECT_THAT(standard.get("sdpa").fits(problem, Place::cuda(0)).reason(),
              HasSubstr("a soft cap, dropout"));
  // flash_attn2 computes a bias and a dense mask for half types only.
  problem.bias = problem.dense_mask = Extents{1, 1, 1, 1};
  EXPECT_TRUE(standard.get("flash_attn2").fits(problem, Place::cuda(0)));
  problem.dtype = DType::float32;
  EXPECT_THAT(standard.get("flash_attn2").fits(problem, Place::cuda(0)).reason(),
              HasSubstr("bias, dense mask and dropout for half types, not for float32"));
  problem.dtype = DType::bfloat16;
  problem.bias.reset();
  problem.dense_mask.reset();
  // The plan adds sinks for every kernel, and nothing drops with probability 0.
  problem.soft_cap.reset();
  problem.dropout.emplace(0.0, 1);
  problem.sinks = Sinks({1}, {1});
  EXPECT_TRUE(standard.get("sdpa").fits(problem, Place::cuda(0)));
}

TEST(Registry, AutoSaysWhyNobodyCan) {
  Registry registry;
  registry.add(fake({"one"}, "reason of one"));
  registry.add(fake({"two"}, "reason of two"));
  const std::string message =
      test::message_of<UnsupportedError>([&] { (void)registry.select("auto", {}, Place::host()); });
  EXPECT_THAT(message, HasSubstr("one: reason of one"));
  EXPECT_THAT(message, HasSubstr("two: reason of two"));
}

TEST(Registry, WhatCannotRunHereSaysWhy) {
  const Registry registry = Registry::standard();
  for (const char* name : {"sdpa", "cudnn", "flash_attn2", "blocksparse"}) {
    const std::string message =
        test::message_of<UnsupportedError>([&] { (void)registry.select(name, {}, Place::host()); });
    EXPECT_THAT(message, HasSubstr(name));
    EXPECT_THAT(message, HasSubstr("CUDA"));
  }
  const std::string message = test::message_of<UnsupportedError>(
      [&] { (void)registry.select("blocksparse", {}, Place::cuda(0)); });
  EXPECT_THAT(message, HasSubstr("multiples of 4 up to 256, not 1 with 1"));
  const Selection selection = registry.select("auto", {}, Place::host());
  EXPECT_EQ(selection.candidates.front(), &registry.get("native"));
  ASSERT_EQ(selection.passed_over.size(), 4U);
  EXPECT_EQ(selection.passed_over[0].first, "sdpa");
  EXPECT_THAT(selection.passed_over[1].second, HasSubstr("CUDA"));
}

TEST(Registry, BlockMasksAreForTheImplementationsThatTakeThem) {
  const Registry registry = Registry::standard();
  AttentionProblem problem = half_problem({1, 512, 512, 2, 2, 128, 128});
  const auto select = [&](const char* name) {
    return registry.select(name, problem, Place::cuda(0), Presence::assumed);
  };
  const auto names = [&] {
    std::vector<std::string> found;
    for (const Implementation* one : select("auto").candidates) found.push_back(one->names()[0]);
    return found;
  };
  EXPECT_THAT(names(), ElementsAre("sdpa", "flash_attn2", "native"));
  EXPECT_THAT(select("auto").passed_over,
              Contains(std::pair<std::string, std::string>(
                  "blocksparse", "meant for problems with a block mask")));
  EXPECT_EQ(select("blocksparse").candidates.size(), 1U) << "asked for by name";
  problem.mask.set_block_mask(BlockMask::random(512, 512, 2, 0.5, 1));
  EXPECT_THAT(names(), ElementsAre("blocksparse", "native"));
  for (const char* name : {"sdpa", "flash_attn2"}) {
    EXPECT_THAT(test::message_of<UnsupportedError>([&] { (void)select(name); }),
                HasSubstr("does not honour a block mask"));
  }
  EXPECT_EQ(registry.select("auto", problem, Place::host(), Presence::assumed).candidates.front(),
            &registry.get("native"));
}

// cuDNN names the part that it refuses.
TEST(Registry, PositionsThatOneBandDoesNotDescribeGoToTheFlashKernels) {
  const Registry registry = Registry::standard();
  const auto expect = [&](const std::string& part, const auto& set) {
    SCOPED_TRACE(part);
    AttentionProblem problem = causal_half_problem({1, 512, 512, 2, 2, 128, 128});
    set(problem.mask);
    const auto select = [&](const char* name) {
      return registry.select(name, problem, Place::cuda(0), Presence::assumed);
    };
    EXPECT_EQ(select("auto").candidates.front(), &registry.get("flash_attn2"));
    for (const char* name : {"flash_attn2", "blocksparse"}) {
      EXPECT_THAT(select(name).candidates, ElementsAre(&registry.get(name)));
    }
    EXPECT_THAT(test::message_of<UnsupportedError>([&] { (void)select("sdpa"); }), HasSubstr(part));
  };
  expect("a prefix", [](Mask& mask) { mask.set_prefix(100); });
  expect("sink tokens", [](Mask& mask) {
    mask.set_sink_tokens(4);
    mask.set_window(50, -1);
  });
  expect("chunks", [](Mask& mask) { mask.set_chunk(128); });
  expect("an offset per batch", [](Mask& mask) { mask.set_offsets({7}); });
  expect("positions inside documents", [](Mask& mask) {
    mask.set_packings(1, {0, 200, 512}, {0, 300, 512}, DocumentAlignment::bottom_right);
  });
}

TEST(Registry, FlashKernelsTakeVectorsOfSixteenBytes) {
  const Registry registry = Registry::standard();
  AttentionProblem problem = problem_of({1, 512, 512, 2, 2, 36, 68});
  const auto reason = [&](DType dtype) {
    problem.dtype = dtype;
    return registry.get("flash_attn2").fits(problem, Place::cuda(0)).reason();
  };
  EXPECT_EQ(reason(DType::float32), "");
  EXPECT_EQ(registry.select("auto", problem, Place::cuda(0), Presence::assumed).candidates.front(),
            &registry.get("flash_attn2"))
      << "cuDNN does not compute float32";
  EXPECT_THAT(reason(DType::bfloat16), HasSubstr("multiples of 8"));
  EXPECT_THAT(reason(DType::float64), HasSubstr("float64"));
  problem.shape.head_dim = 6;
  EXPECT_THAT(reason(DType::float32), HasSubstr("multiples of 4"));
  problem.shape.head_dim = problem.shape.value_dim = 64;
  problem.scale = -1.0;
  EXPECT_EQ(reason(DType::float32), "");
  EXPECT_THAT(reason(DType::bfloat16), HasSubstr("positive scale"));
}

TEST(Registry, NativeRunsOnTheHostInThreeDtypes) {
  const Registry registry = Registry::standard();
  AttentionProblem problem;
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
    problem.dtype = dtype;
    EXPECT_TRUE(registry.get("native").capability(problem, Place::host()));
  }
  EXPECT_THAT(registry.get("native").capability(problem, Place::cuda(1)).reason(),
              HasSubstr("cuda:1"));
  problem.dtype = DType::float64;
  EXPECT_THAT(registry.get("native").capability(problem, Place::host()).reason(),
              HasSubstr("float64"));
}

TEST(Registry, StrategiesLeaveTheKernelsToAuto) {
  const Registry registry = Registry::standard();
  AttentionProblem problem = problem_of({1, 1, 64, 4, 2, 16, 16});
  const Selection defaults = registry.select("auto", problem, Place::host());
  EXPECT_EQ(defaults.schedule, "auto");
  for (const auto& [name, schedule] :
       {std::pair("ring", "ring"), std::pair("autoregressive_decodeattn", "auto")}) {
    EXPECT_NO_THROW(registry.check_name(name));
    const Selection selection = registry.select(name, problem, Place::host());
    EXPECT_EQ(selection.candidates, defaults.candidates);
    EXPECT_EQ(selection.schedule, schedule);
    // Strategies are not kernels.
    EXPECT_THAT(test::message_of<ArgumentError>([&, one = name] { (void)registry.get(one); }),
                AllOf(HasSubstr(name), HasSubstr("a local kernel")));
  }
  EXPECT_THROW(registry.check_name("decode"), ArgumentError);
  EXPECT_NO_THROW(registry.check_name("auto"));
}

TEST(Registry, OneQueryPerSequenceIsAllThatDecodingTakes) {
  const Registry registry = Registry::standard();
  AttentionProblem problem = problem_of({1, 2, 64, 4, 2, 16, 16});
  EXPECT_THAT(test::message_of<UnsupportedError>([&] {
                (void)registry.select("autoregressive_decodeattn", problem, Place::host());
              }),
              AllOf(HasSubstr("autoregressive_decodeattn"), HasSubstr("T = 2")));
}

TEST(Registry, NamesOfStrategiesAreTakenOnceToo) {
  const auto anything = [](const AttentionProblem&) { return Capability::yes(); };
  Registry registry = Registry::standard();
  for (const char* name : {"ring", "cudnn", "auto"}) {
    EXPECT_THROW(registry.add(Strategy{name, "auto", anything}), ArgumentError);
  }
  EXPECT_THROW(registry.add(fake({"ring"})), ArgumentError);
  registry.add(Strategy{"mine", "allgather", anything});
  EXPECT_EQ(registry.names().back(), "mine");
}

TEST(Registry, AStrategyAgreesWithTheScheduleThatIsAskedFor) {
  Selection selection;
  EXPECT_EQ(selection.schedule_for("allgather"), "allgather");
  selection.schedule = "ring";
  EXPECT_EQ(selection.schedule_for("auto"), "ring");
  EXPECT_EQ(selection.schedule_for("ring"), "ring");
  EXPECT_THAT(test::message_of<ArgumentError>([&] { (void)selection.schedule_for("allgather"); }),
              AllOf(HasSubstr("schedule: got allgather"), HasSubstr("ring")));
}

TEST(Registry, AFloat64SoftmaxIsNotTakenForFloat32) {
  const Registry registry = Registry::standard();
  AttentionProblem problem;
  problem.softmax_dtype = DType::float64;
  EXPECT_THAT(registry.get("native").capability(problem, Place::host()).reason(),
              HasSubstr("does not honour float64"));
}

TEST(Registry, ForceNativeOverridesEveryName) {
  const Registry registry = Registry::standard();
  {
    const EnvironmentVariable on("ANNULUS_FORCE_NATIVE", "1");
    for (const char* name : {"auto", "cudnn", "native", "ring"}) {
      EXPECT_EQ(registry.select(name, {}, Place::host()).candidates.front(),
                &registry.get("native"));
    }
    EXPECT_EQ(registry.select("ring", {}, Place::host()).schedule, "ring");
    EXPECT_THAT(registry.select("auto", {}, Place::host()).passed_over,
                Contains(Pair("flash_attn2", "ANNULUS_FORCE_NATIVE asks for native")));
    EXPECT_THROW((void)registry.select("auto", {}, Place::cuda(0)), UnsupportedError);
    AttentionProblem wide;
    wide.dtype = DType::float64;
    const auto refusal = [&](const char* name) {
      return test::message_of<UnsupportedError>(
          [&] { (void)registry.select(name, wide, Place::host()); });
    };
    EXPECT_THAT(refusal("vanilla"), AllOf(HasSubstr("native, which ANNULUS_FORCE_NATIVE asks for"),
                                          HasSubstr("float64")));
    EXPECT_THAT(refusal("native"), Not(HasSubstr("ANNULUS_FORCE_NATIVE")));  // not the cause
  }
  const EnvironmentVariable off("ANNULUS_FORCE_NATIVE", "0");
  EXPECT_THROW((void)registry.select("cudnn", {}, Place::host()), UnsupportedError);
}

TEST(FewRows, AreOfAllHeadsOfAKeyValueHead) {
  EXPECT_FALSE(FewRows().include(1, 1, 1, 1 << 20));
  const FewRows few{.most = 64, .always = 32, .tiles = 132, .columns = 16};
  EXPECT_TRUE(few.include(1, 8, 64, 128));
  EXPECT_FALSE(few.include(1, 8, 64, 127));  // fewer keys
  EXPECT_TRUE(few.include(4, 8, 1000, 512));
  EXPECT_TRUE(few.include(5, 8, 131, 640));
  EXPECT_FALSE(few.include(5, 8, 132, 640));  // a tile for each multiprocessor
  EXPECT_TRUE(few.include(8, 8, 64, 1024));
  EXPECT_FALSE(few.include(9, 8, 64, 4096));
}

TEST(Registry, TheBackwardPassHasImplementationsOfItsOwn) {
  const Registry registry = Registry::standard();
  AttentionProblem problem;
  const auto select = [&](std::string_view name) {
    return registry.select(name, problem, Place::host(), Presence::required, Pass::backward);
  };
  // Forward, vanilla is meant for other problems.
  EXPECT_THAT(select("auto").candidates,
              ElementsAre(&registry.get("native"), &registry.get("vanilla")));
  EXPECT_THAT(message_of<UnsupportedError>([&] { (void)select("sdpa"); }),
              HasSubstr("implementation sdpa: cuDNN runs on CUDA devices"));
  EXPECT_TRUE(registry.get("native").fits_backward(problem, Place::cuda(0)));
  problem.dtype = DType::float64;
  EXPECT_THAT(select("auto").candidates, ElementsAre(&registry.get("vanilla")));
  problem.dtype = DType::float32;
  problem.normalize_output = false;
  EXPECT_FALSE(registry.get("native").fits_backward(problem, Place::host()));
}

}  // namespace
}  // namespace annulus::test
