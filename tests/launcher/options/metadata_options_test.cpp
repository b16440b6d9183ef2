// Options that come from attention metadata.
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/ring/metadata.hpp>

#include "tests/launcher/options/parsing.hpp"

namespace annulus::launcher {
namespace {

TEST(MetadataOptions, StandBetweenCommandLineAndEnvironment) {
  const OptionFile metadata(R"({"softmax_scale": 2, "soft_cap": 2.5, "runtime_dtype": "bfloat16",
      "mode": "prefill", "mesh": "ctx=3", "sequence_axis_name": "ctx", "dropout_prob": 0.25,
      "dropout_seed": 18446744073709551615, "runtime_softmax_dtype": "float64", "backend": "cpu",
      "normalize_output": false, "implementation": "native", "sharding_rules": {"head": null}})");
  const Variable scale("ANNULUS_SCALE", "3");
  const Variable cap("ANNULUS_SOFT_CAP", "3");
  const Variable threads("ANNULUS_THREADS", "3");
  const Options options = parse("bench --metadata " + metadata.path() + " --scale 1");
  EXPECT_EQ(options.scale, 1.0);
  EXPECT_EQ(options.soft_cap, 2.5);
  EXPECT_EQ(options.threads, 3);
  EXPECT_EQ(options.dtype, DType::bfloat16);
  EXPECT_EQ(options.mode, "prefill");
  EXPECT_EQ(options.mesh, "ctx=3");
  EXPECT_EQ(options.sequence_axis, "ctx");
  EXPECT_EQ(options.dropout, 0.25);
  EXPECT_EQ(options.seed, 18446744073709551615U);
  EXPECT_EQ(options.softmax_dtype, DType::float64);
  EXPECT_EQ(options.device, "cpu");
  EXPECT_FALSE(options.normalize_output);
  EXPECT_EQ(options.implementation, "native");
  EXPECT_EQ(options.rules.rules().size(), 1U);
  EXPECT_THAT(options.warnings, ::testing::IsEmpty());
  EXPECT_THAT(options.given, AllOf(HasSubstr("--scale=1"), HasSubstr("--soft-cap=2.5"),
                                   HasSubstr(R"(--sharding-rules={"head":{"all":null}})")));
}

// The chain of docs/semantics.md §2, each source taken away in turn.
TEST(MetadataOptions, EverySourceComesBeforeTheNext) {
  const OptionFile metadata(R"({"soft_cap": 2})");
  const OptionFile config("soft-cap = 5\n");
  const OptionFile both("soft-cap = 5\nmetadata = " + metadata.path() + "\n");
  std::optional<Variable> own(std::in_place, "ANNULUS_SOFT_CAP", "3");
  std::optional<Variable> field(std::in_place, "ANNULUS_METADATA_SOFT_CAP", "4");
  const auto cap = [](const std::string& more) {
    const Options options = parse("bench" + more);
    EXPECT_THAT(options.warnings, ::testing::IsEmpty());
    return options.soft_cap;
  };
  EXPECT_EQ(cap(" --soft-cap 1 --config " + both.path()), 1.0);
  EXPECT_EQ(cap(" --metadata " + metadata.path() + " --config " + config.path()), 2.0);
  EXPECT_EQ(cap(" --config " + both.path()), 2.0);  // wherever the file is named
  {
    const Variable named("ANNULUS_METADATA", metadata.path());
    EXPECT_EQ(cap(" --config " + config.path()), 2.0);
    EXPECT_EQ(parse("info").soft_cap, std::nullopt);  // not an option of info
  }
  EXPECT_EQ(cap(" --config " + config.path()), 3.0);
  own.reset();
  EXPECT_EQ(cap(" --config " + config.path()), 4.0);
  field.reset();
  EXPECT_EQ(cap(" --config " + config.path()), 5.0);
  EXPECT_EQ(cap(""), std::nullopt);
}

TEST(MetadataOptions, AnExplicitNoneIsTheDefault) {
  const OptionFile metadata(R"({"soft_cap": null, "softmax_scale": null, "mesh": null})");
  const Variable cap("ANNULUS_SOFT_CAP", "3");
  const Options options = parse("bench --metadata " + metadata.path() + " --scale 2");
  EXPECT_EQ(options.soft_cap, std::nullopt);
  EXPECT_EQ(options.scale, 2.0);
  EXPECT_THAT(options.given, Not(HasSubstr("--soft-cap")));
}

// A dump of all fields says what nothing says.
TEST(MetadataOptions, DefaultsChangeNothing) {
  const OptionFile metadata(to_json(AttentionMetadata()));
  const Options options = parse("run --metadata " + metadata.path());
  const Options defaults = parse("run");
  EXPECT_THAT(options.warnings, ::testing::IsEmpty());
  EXPECT_EQ(options.scale, defaults.scale);
  EXPECT_EQ(options.mesh, defaults.mesh);
  EXPECT_EQ(options.dropout, defaults.dropout);
  EXPECT_EQ(options.device, defaults.device);
  EXPECT_EQ(options.implementation, defaults.implementation);
}

TEST(MetadataOptions, OfBadValuesNameKeyAndFile) {
  const OptionFile bad(R"({"dropout_prob": 2})");
  EXPECT_THAT(error_of("bench --metadata " + bad.path()),
              HasSubstr("--metadata: dropout_prob in " + bad.path() + ": got 2, expected"));
  const OptionFile mesh(R"({"implementation": "fastest"})");
  EXPECT_THAT(error_of("bench --metadata " + mesh.path()),
              AllOf(HasSubstr("implementation in " + mesh.path()), HasSubstr("'fastest'")));
  EXPECT_THAT(error_of("bench --metadata none.json"), HasSubstr("--metadata none.json"));
  EXPECT_THAT(error_of("bench --metadata "), HasSubstr("--metadata: got ''"));
  const Variable variable("ANNULUS_METADATA_MODE", "training");
  EXPECT_THAT(error_of("bench"), HasSubstr("ANNULUS_METADATA_MODE"));
}

TEST(MetadataOptions, RefuseUnknownKeysUnlessLenientAndWarnAboutHints) {
  const OptionFile metadata(R"({"soft_cup": 2, "blocksize_q": 64})");
  const Variable variable("ANNULUS_METADATA_BLOCKSIZE", "64");
  EXPECT_THAT(error_of("bench --metadata " + metadata.path()),
              AllOf(HasSubstr("--metadata " + metadata.path() +
                              ": unknown key 'soft_cup'; the "
                              "nearest is soft_cap; known keys are runtime_dtype, "),
                    HasSubstr("(--metadata-lenient ignores others)")));
  EXPECT_THAT(error_of("bench --metadata-lenient"), HasSubstr("without --metadata"));
  const Options options = parse("bench --metadata " + metadata.path() + " --metadata-lenient");
  ASSERT_EQ(options.warnings.size(), 3U);
  EXPECT_THAT(options.warnings[0], HasSubstr("'ANNULUS_METADATA_BLOCKSIZE'"));
  EXPECT_THAT(options.warnings[1], AllOf(HasSubstr("'soft_cup'"), HasSubstr(metadata.path())));
  EXPECT_THAT(options.warnings[2], HasSubstr("blocksize_q = 64 has no effect"));
}

}  // namespace
}  // namespace annulus::launcher
