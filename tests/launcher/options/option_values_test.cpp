// Spellings of values: dtypes, devices, bytes and times, and the answers to misspelt ones.
#include "launcher/options/option_values.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/metadata.hpp>

#include "launcher/options/nearest.hpp"
#include "tests/launcher/options/parsing.hpp"
#include "tests/support/environment_variable.hpp"

namespace annulus::launcher {
namespace {

TEST(OptionValues, ShortNamesOfDtypes) {
  EXPECT_EQ(parse("bench --dtype bf16").dtype, DType::bfloat16);
  EXPECT_EQ(parse("bench --dtype fp16").dtype, DType::float16);
  EXPECT_EQ(parse("bench --softmax-dtype fp64").softmax_dtype, DType::float64);
  EXPECT_EQ(parse("bench --backward --grad-wire bf16").grad_wire, DType::bfloat16);
  EXPECT_THAT(error_of("bench --grad-wire fp16"),
              HasSubstr("got 'float16', expected one of float32, bfloat16"));
}

TEST(OptionValues, DeterministicGradientsAreRepeatedOnes) {
  for (const char* command : {"run --grad-output g.npy", "verify --backward", "verify --random 3",
                              "bench --backward", "plan --backward"}) {
    const std::string words = std::string(command) + " --deterministic";
    EXPECT_EQ(parse(words).reproducible, Reproducible::run) << words;
    EXPECT_EQ(parse(words + "=false").reproducible, Reproducible::no) << words;
  }
  EXPECT_EQ(parse("plan --reproducible no").reproducible, Reproducible::no);
  EXPECT_FALSE(parse("bench --backward").reproducible.has_value());
  const test::EnvironmentVariable variable("ANNULUS_REPRODUCIBLE", "world");
  EXPECT_EQ(parse("plan --backward --deterministic").reproducible, Reproducible::run);
  EXPECT_EQ(parse("plan --backward").reproducible, Reproducible::world);
}

TEST(OptionValues, AGpuIsADeviceOfCuda) {
  EXPECT_EQ(parse("bench --device gpu").device, "cuda");
  EXPECT_EQ(parse_backend("gpu"), Backend::cuda);
}

TEST(OptionValues, BytesHaveTheUnitsOfVendorsAndOurs) {
  const auto bytes = [](const char* text) { return parse_bytes("--memory", text); };
  EXPECT_EQ(bytes("80GB"), 80'000'000'000);
  EXPECT_EQ(bytes("80GiB"), std::int64_t{80} << 30);
  EXPECT_EQ(bytes("80G"), std::int64_t{80} << 30);
  EXPECT_EQ(bytes("1.5MB"), 1'500'000);
  EXPECT_EQ(bytes("4096"), 4096);
  for (const char* wrong : {"GB", "-1GB", "80 GB", "0", "80gb", "1e300GB", "nanGB"}) {
    EXPECT_THROW(static_cast<void>(bytes(wrong)), ArgumentError) << wrong;
  }
}

TEST(OptionValues, TimesHaveUnits) {
  EXPECT_EQ(parse("bench --timeout 5m").timeout, 300);
  EXPECT_EQ(parse("bench --timeout 90s").timeout, 90);
  EXPECT_EQ(parse("bench --timeout 1.5h").timeout, 5400);
  EXPECT_EQ(parse("bench --timeout 2min").timeout, 120);
  EXPECT_EQ(parse("bench --warm-seconds 500ms").warm_seconds, 0.5);
  EXPECT_EQ(parse("bench --timeout 20").timeout, 20);
  for (const char* wrong : {"m", "-5m", "5d", "5 m", "0s", "inf", ""}) {
    EXPECT_FALSE(seconds_of_text(wrong).has_value()) << wrong;
  }
}

TEST(OptionValues, AMisspeltValueIsAnsweredWithTheNearest) {
  EXPECT_THAT(error_of("bench --schedule rnig"), HasSubstr("; the nearest is ring"));
  EXPECT_THAT(error_of("bench --impl nativ"), HasSubstr("; the nearest is native"));
  EXPECT_THAT(error_of("bench --dtype Float32"), HasSubstr("; the nearest is float32"));
  EXPECT_THAT(error_of("bench --sequence-layout zig-zag"), HasSubstr("; the nearest is zigzag"));
  EXPECT_THAT(error_of("bench --schedule xyzzy"), Not(HasSubstr("nearest")));
}

TEST(OptionValues, NearestNeedsSomethingInCommon) {
  EXPECT_EQ(nearest_hint("a", "", {"bc"}), "");
  EXPECT_EQ(nearest_hint("windw", "--", {"trace", "window"}), "; the nearest is --window");
  EXPECT_EQ(nearest_hint("anything", "", {}), "");
}

TEST(OptionValues, LogLevelsAreReadInAnyCase) {
  {
    const Variable level("ANNULUS_LOG_LEVEL", "INFO");
    EXPECT_THAT(parse("bench").warnings, ::testing::IsEmpty());
  }
  const Variable level("ANNULUS_LOG_LEVEL", "degub");
  EXPECT_THAT(parse("bench").warnings,
              ::testing::ElementsAre(AllOf(HasSubstr("ANNULUS_LOG_LEVEL: got 'degub'"),
                                           HasSubstr("or off; the nearest is debug"))));
}

TEST(OptionValues, ExamplesOfTheHelpCanBePasted) {
  for (const char* command : {"run", "verify", "bench", "plan", "info"}) {
    const std::string help = help_of(fmt::format("{} --help", command));
    const std::string begin = "\nexample:\n";
    const std::size_t at = help.find(begin);
    ASSERT_NE(at, std::string::npos) << command;
    const std::string lines =
        help.substr(at + begin.size(), help.find("\n\n", at + begin.size()) - at - begin.size());
    for (const std::string_view line : split(lines, '\n')) {
      const std::size_t program = line.find("annulus ");
      ASSERT_NE(program, std::string_view::npos) << line;
      const Options options = parse(std::string(line.substr(program + 8)));
      EXPECT_EQ(name_of(options.command), command);
    }
  }
}

TEST(OptionValues, NothingGivenShowsTheUsage) {
  EXPECT_EQ(help_of(), help_of("--help"));
  EXPECT_THAT(help_of(), HasSubstr("usage: [mpirun -n RANKS] annulus COMMAND"));
}

}  // namespace
}  // namespace annulus::launcher
