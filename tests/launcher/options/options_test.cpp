// Tests of the meaning of options, and of where they come from.
#include <cstdint>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/launcher/options/parsing.hpp"

namespace annulus::launcher {
namespace {

TEST(Options, DefaultsWithoutAnythingGiven) {
  const Options options = parse("bench");
  Options defaults;
  defaults.command = Command::bench;
  defaults.warnings = options.warnings;  // about the environment
  EXPECT_EQ(options, defaults);
  EXPECT_EQ(options.schedule, "auto");
  EXPECT_EQ(options.timeout, 300);
  EXPECT_EQ(options.dropout, 0);
}

TEST(Options, CommandLineOverEnvironmentOverFileOverDefault) {
  const OptionFile config("iters = 20\nwarmup = 20  # a comment\n\nseed=20\n");
  const Variable iterations("ANNULUS_ITERS", "30");
  const Variable warmup("ANNULUS_WARMUP", "30");
  const Variable offset("ANNULUS_CAUSAL_OFFSET", "-3");
  const Options options = parse("bench --config " + config.path() + " --iters=10");
  EXPECT_EQ(options.iterations, 10);  // command line
  EXPECT_EQ(options.warmup, 30);      // environment
  EXPECT_EQ(options.causal_offset.value().value, -3);
  EXPECT_EQ(options.seed, 20U);                   // file
  EXPECT_EQ(options.timeout, Options().timeout);  // default
}

TEST(Options, TheEnvironmentTakesAFlagOfTheFileBack) {
  const OptionFile config("causal = true\n");
  const Variable variable("ANNULUS_CAUSAL", "false");
  EXPECT_FALSE(parse("bench --config " + config.path()).causal);
  EXPECT_TRUE(parse("bench --config " + config.path() + " --causal").causal);
}

TEST(Options, OptionFileMayComeFromTheEnvironment) {
  const OptionFile config("iters = 9\n");
  const Variable variable("ANNULUS_CONFIG", config.path());
  EXPECT_EQ(parse("bench").iterations, 9);
}

TEST(Options, FlagsCanBeTakenBack) {
  const Variable variable("ANNULUS_CAUSAL", "1");
  EXPECT_TRUE(parse("bench").causal);
  EXPECT_FALSE(parse("bench --causal=false").causal);
  EXPECT_TRUE(parse("bench --causal --explain").explain);
}

TEST(Options, FileAndEnvironmentMayServeOtherCommands) {
  const OptionFile config("max-tp = 3\nmesh = sp=4\n");
  const Variable variable("ANNULUS_ITERS", "nonsense");
  const Options options = parse("run --config " + config.path() + " --output o.npy");
  EXPECT_EQ(options.mesh, "sp=4");
  EXPECT_THAT(options.given, Not(HasSubstr("max-tp")));
}

TEST(Options, UnnormalisedOutputsComeWithMaximumAndSum) {
  EXPECT_TRUE(parse("bench").normalize_output);
  EXPECT_TRUE(parse("bench --normalize-output true").normalize_output);
  EXPECT_FALSE(parse("bench --normalize-output false").normalize_output);
  EXPECT_FALSE(parse("plan --normalize-output=false").normalize_output);
  const OptionFile config("normalize-output = false\n");
  EXPECT_FALSE(parse("verify --config " + config.path()).normalize_output);
  EXPECT_THAT(error_of("bench --normalize-output"),
              AllOf(HasSubstr("--normalize-output"), HasSubstr("BOOL")));
  const auto with = [](const std::string& more) { return "run --output o.npy " + more; };
  const Options options = parse(with("--normalize-output false --maximum m.npy --sum s.npy"));
  EXPECT_EQ(options.maximum, "m.npy");
  EXPECT_EQ(options.sum, "s.npy");
  EXPECT_THAT(error_of(with("--maximum m.npy")),
              HasSubstr("--maximum m.npy: needs --normalize-output false"));
  EXPECT_THAT(error_of(with("--sum s.npy")), HasSubstr("--sum s.npy: needs"));
  EXPECT_THAT(error_of(with("--normalize-output false --sum s.npy")),
              HasSubstr("--maximum: got nothing"));
  EXPECT_THAT(error_of(with("--normalize-output false --maximum m.npy")),
              HasSubstr("--sum: got nothing"));
  EXPECT_THAT(error_of(with("--normalize-output false --maximum m.npy --sum s.npy --lse l.npy")),
              AllOf(HasSubstr("--lse l.npy"), HasSubstr("maximum + log(sum)")));
}

TEST(Options, GivenListsWhatWasGivenWhereverFrom) {
  const Variable variable("ANNULUS_CAUSAL", "1");
  EXPECT_THAT(parse("bench --mesh sp=4").given,
              AllOf(HasSubstr("--mesh=sp=4"), HasSubstr("--causal=1")));
}

TEST(Options, UnknownVariablesWarn) {
  const Variable known("ANNULUS_LOG_LEVEL", "off");
  const Variable unknown("ANNULUS_CASUAL", "1");
  const Options options = parse("bench");
  ASSERT_EQ(options.warnings.size(), 1U);
  EXPECT_THAT(options.warnings[0], HasSubstr("ANNULUS_CASUAL"));
}

TEST(Options, ShapeWithSuffixes) {
  const AttentionShape shape = parse("plan --shape 2,1k,1M,64,8,128").shape.value();
  EXPECT_EQ(shape.batch, 2);
  EXPECT_EQ(shape.query_length, 1024);
  EXPECT_EQ(shape.kv_length, 1024 * 1024);
  EXPECT_EQ(shape.heads, 64);
  EXPECT_EQ(shape.kv_heads, 8);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.value_dim, 128);
  EXPECT_EQ(parse("plan --shape 1,4,4,1,1,8,16").shape->value_dim, 16);
}

TEST(Options, SizesInThousandsAndInPowersOf1024) {
  const auto length = [](const std::string& size) {
    return parse("plan --shape 1,1," + size + ",1,1,8").shape.value().kv_length;
  };
  EXPECT_EQ(length("2k"), 2048);
  EXPECT_EQ(length("2K"), 2048);
  EXPECT_EQ(length("3M"), std::int64_t{3} << 20);
  EXPECT_EQ(length("1G"), std::int64_t{1} << 30);
  EXPECT_EQ(length("1e6"), 1000000);
  EXPECT_EQ(length("2.5e3"), 2500);
  EXPECT_EQ(length("1E+2"), 100);
  EXPECT_EQ(parse("bench --sweep 1e3:1G:4").sequence_sweep->begin, 1000);
  EXPECT_EQ(parse("plan --window 4k,-1").window->left, 4096);
  EXPECT_EQ(parse("plan --causal --causal-offset -1e3").causal_offset->value, -1000);
}

TEST(Options, BlockMasks) {
  const Options options = parse("plan --block-mask m.npy --block-size 64,1k");
  EXPECT_EQ(options.block_mask, "m.npy");
  EXPECT_EQ(options.block_size, (BlockSize{64, 1024}));
  EXPECT_EQ(parse("run --block-size 32").block_size, (BlockSize{32, 32}));
}

TEST(Options, WindowsAndOffsets) {
  const WindowSize both = parse("plan --window 100").window.value();
  EXPECT_EQ(both.left, 100);
  EXPECT_EQ(both.right, 100);
  const WindowSize open = parse("plan --window -1,0").window.value();
  EXPECT_EQ(open.left, -1);
  EXPECT_EQ(open.right, 0);
  EXPECT_TRUE(parse("plan --causal --causal-offset bottom-right").causal_offset->bottom_right);
  EXPECT_EQ(parse("plan --causal --causal-offset -5").causal_offset->value, -5);
}

TEST(Options, LayoutsOfQueriesAndKeys) {
  const Options one = parse("plan --sequence-layout striped");
  EXPECT_EQ(one.sequence_layout, "striped");
  EXPECT_EQ(one.kv_sequence_layout, "auto");
  const Options two = parse("plan --sequence-layout auto,zigzag --granule 4k");
  EXPECT_EQ(two.sequence_layout, "auto");
  EXPECT_EQ(two.kv_sequence_layout, "zigzag");
  EXPECT_EQ(two.granule, 4096);
}

TEST(Options, SpecsMayBeginWithNone) {
  EXPECT_EQ(parse("plan --query-spec -,sp,-,-").query_spec, "-,sp,-,-");
}

TEST(Options, SweepsAndRandomCases) {
  const SweepRange sweep = parse("bench --sweep 1k:16k:4").sequence_sweep.value();
  EXPECT_EQ(sweep.begin, 1024);
  EXPECT_EQ(sweep.end, 16384);
  EXPECT_EQ(sweep.factor, 4);
  EXPECT_EQ(parse("bench --sweep 5:10").sequence_sweep->factor, 2);
  const RandomCase random =
      parse("verify --random-case 18446744073709551615:7").random_case.value();
  EXPECT_EQ(random.seed, 18446744073709551615U);
  EXPECT_EQ(random.index, 7);
}

TEST(Options, TransportsBetweenGpus) {
  EXPECT_EQ(parse("bench").transport, Transport::automatic);
  EXPECT_EQ(parse("run --transport nccl").transport, Transport::nccl);
  EXPECT_EQ(parse("verify --transport peer --device cuda").transport, Transport::peer);
  EXPECT_FALSE(parse("bench --transport peer").share_gpus);
  const Options shared = parse("bench --share-gpus");
  EXPECT_TRUE(shared.share_gpus);
  EXPECT_EQ(shared.transport, Transport::peer);
  EXPECT_EQ(parse("bench --device cpu --transport auto").transport, Transport::automatic);
  EXPECT_EQ(parse("bench --share-gpus --transport composite").transport, Transport::composite);
  EXPECT_THAT(error_of("bench --calibrate model.json --transport composite"),
              HasSubstr("--calibrate measures peer and nccl"));
  EXPECT_THAT(error_of("bench --share-gpus --transport nccl"),
              AllOf(HasSubstr("--transport"), HasSubstr("--share-gpus")));
  for (const std::string name : {"composite", "nccl", "peer"}) {
    EXPECT_THAT(error_of("run --device cpu --transport " + name),
                AllOf(HasSubstr(name), HasSubstr("needs GPU ranks")));
  }
  EXPECT_THAT(error_of("run --device cpu --share-gpus"),
              AllOf(HasSubstr("--share-gpus"), HasSubstr("needs GPU ranks")));
  EXPECT_EQ(parse("plan --device cuda --transport nccl").transport, Transport::nccl);
  EXPECT_THAT(error_of("plan --transport peer"), HasSubstr("needs --device cuda"));
  EXPECT_THAT(error_of("plan --share-gpus"), HasSubstr("not of annulus plan"));
}

TEST(Options, ATransportOfTheEnvironmentIsForCommandsThatUseGpus) {
  const Variable transport("ANNULUS_TRANSPORT", "nccl");
  EXPECT_EQ(parse("plan").transport, Transport::automatic);
  EXPECT_EQ(parse("run --device cpu").transport, Transport::automatic);
  EXPECT_EQ(parse("plan --device cuda").transport, Transport::nccl);
  EXPECT_EQ(parse("run").transport, Transport::nccl);
  EXPECT_THAT(error_of("plan --transport nccl"), HasSubstr("needs --device cuda"));
  const Variable sharing("ANNULUS_SHARE_GPUS", "true");
  const Options shared = parse("bench --device cpu");
  EXPECT_FALSE(shared.share_gpus);
  EXPECT_EQ(shared.transport, Transport::automatic);
}

TEST(Options, BiasAndMask) {
  EXPECT_EQ(parse("run").bias_policy, BiasPolicy::combine);
  const Options options = parse("run --bias b.npy --mask m.npy --bias-policy bias_disables_causal");
  EXPECT_EQ(options.bias, "b.npy");
  EXPECT_EQ(options.mask, "m.npy");
  EXPECT_EQ(options.bias_policy, BiasPolicy::bias_disables_causal);
  EXPECT_EQ(parse("run --bias-policy bias_wins").bias_policy, BiasPolicy::bias_wins);
}

TEST(Options, Commands) {
  EXPECT_THAT(error_of("rnu"), AllOf(HasSubstr("'rnu'"), HasSubstr("nearest is run")));
  EXPECT_THAT(error_of("--mesh sp=4"), HasSubstr("'--mesh'"));
}

TEST(Options, Help) {
  EXPECT_THAT(help_of("--help"), AllOf(HasSubstr("verify"), HasSubstr("Exit codes")));
  EXPECT_THAT(help_of("--version"), ::testing::MatchesRegex("annulus [0-9.]+\n"));
  const std::string run = help_of("run --help");
  EXPECT_THAT(run,
              AllOf(HasSubstr("--query-spec"), HasSubstr("(default: 300)"), HasSubstr("SECONDS"),
                    Not(HasSubstr("--iters")), Not(HasSubstr("--shape"))));
  EXPECT_THAT(help_of("bench --help"),
              AllOf(HasSubstr("--iters"), HasSubstr("(default: 10)"), Not(HasSubstr("--output"))));
  EXPECT_THAT(help_of("info -h"), AllOf(HasSubstr("--json"), Not(HasSubstr("--mesh"))));
  EXPECT_EQ(run, help_of("run --mesh sp=4 --help"));
  EXPECT_EQ(run, help_of("help run"));
  EXPECT_EQ(help_of("--help"), help_of("help"));
  EXPECT_THAT(error_of("help rnu"), AllOf(HasSubstr("'rnu'"), HasSubstr("nearest is run")));
  EXPECT_THAT(error_of("help run --mesh"), HasSubstr("annulus help COMMAND"));
}

}  // namespace
}  // namespace annulus::launcher
