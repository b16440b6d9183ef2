#include "launcher/options/options.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "launcher/options/option_table.hpp"
#include "tests/launcher/options/parsing.hpp"

namespace annulus::launcher {
namespace {

TEST(Options, DefaultsWithoutAnythingGiven) {
  const Options options = parse({"bench"});
  EXPECT_EQ(options.command, Command::bench);
  EXPECT_EQ(options.schedule, "auto");
  EXPECT_EQ(options.sequence_layout, "auto");
  EXPECT_EQ(options.timeout, 300);
  EXPECT_EQ(options.warmup, 2);
  EXPECT_EQ(options.iterations, 10);
  EXPECT_FALSE(options.causal);
  EXPECT_FALSE(options.window.has_value());
  EXPECT_FALSE(options.mesh.has_value());
  EXPECT_EQ(options.given, "");
}

TEST(Options, CommandLineOverEnvironmentOverFileOverDefault) {
  const OptionFile config("iters = 20\nwarmup = 20  # a comment\n\nseed = 20\n");
  const Variable iterations("ANNULUS_ITERS", "30");
  const Variable warmup("ANNULUS_WARMUP", "30");
  const Options options = parse({"bench", "--config", config.path(), "--iters", "10"});
  EXPECT_EQ(options.iterations, 10);                        // command line
  EXPECT_EQ(options.warmup, 30);                            // environment
  EXPECT_EQ(options.seed, 20U);                             // file
  EXPECT_EQ(options.timeout, Options().timeout);            // default
  EXPECT_EQ(parse({"plan", "--timeout", "5"}).timeout, 5);  // ranks of plan agree too
}

TEST(Options, TheEnvironmentTakesAFlagOfTheFileBack) {
  const OptionFile config("causal = true\n");
  const Variable variable("ANNULUS_CAUSAL", "false");
  EXPECT_FALSE(parse({"bench", "--config", config.path()}).causal);
  EXPECT_TRUE(parse({"bench", "--config", config.path(), "--causal"}).causal);
}

TEST(Options, EachSourceAlone) {
  EXPECT_EQ(parse({"bench", "--iters=7"}).iterations, 7);
  {
    const OptionFile config("iters=8\ncausal = true\n");
    const Options options = parse({"bench", "--config", config.path()});
    EXPECT_EQ(options.iterations, 8);
    EXPECT_TRUE(options.causal);
  }
  const Variable variable("ANNULUS_CAUSAL_OFFSET", "-3");
  const Options options = parse({"bench"});
  ASSERT_TRUE(options.causal_offset.has_value());
  EXPECT_EQ(options.causal_offset->value, -3);
}

TEST(Options, OptionFileMayComeFromTheEnvironment) {
  const OptionFile config("iters = 9\n");
  const Variable variable("ANNULUS_CONFIG", config.path());
  EXPECT_EQ(parse({"bench"}).iterations, 9);
}

TEST(Options, FlagsCanBeTakenBack) {
  const Variable variable("ANNULUS_CAUSAL", "1");
  EXPECT_TRUE(parse({"bench"}).causal);
  EXPECT_FALSE(parse({"bench", "--causal=false"}).causal);
  EXPECT_TRUE(parse({"bench", "--causal", "--explain"}).explain);
}

TEST(Options, FileAndEnvironmentMayServeOtherCommands) {
  const OptionFile config("show-ranks = 3\nmesh = sp=4\n");
  const Variable variable("ANNULUS_ITERS", "nonsense");
  const Options options = parse({"run", "--config", config.path(), "--output", "o.npy"});
  EXPECT_EQ(options.mesh, "sp=4");
  EXPECT_THAT(options.given, Not(HasSubstr("show-ranks")));
}

TEST(Options, UnnormalisedOutputsComeWithMaximumAndSum) {
  EXPECT_TRUE(parse({"bench"}).normalize_output);
  EXPECT_TRUE(parse({"bench", "--normalize-output", "true"}).normalize_output);
  EXPECT_FALSE(parse({"bench", "--normalize-output", "false"}).normalize_output);
  EXPECT_FALSE(parse({"plan", "--normalize-output=false"}).normalize_output);
  const OptionFile config("normalize-output = false\n");
  EXPECT_FALSE(parse({"verify", "--config", config.path()}).normalize_output);
  EXPECT_THAT(error_of({"bench", "--normalize-output"}),
              AllOf(HasSubstr("--normalize-output"), HasSubstr("BOOL")));
  const Words run{"run", "--output", "o.npy"};
  const auto with = [&run](const Words& more) {
    Words words = run;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Options options =
      parse(with({"--normalize-output", "false", "--maximum", "m.npy", "--sum", "s.npy"}));
  EXPECT_EQ(options.maximum, "m.npy");
  EXPECT_EQ(options.sum, "s.npy");
  EXPECT_THAT(error_of(with({"--maximum", "m.npy"})),
              HasSubstr("--maximum m.npy: needs --normalize-output false"));
  EXPECT_THAT(error_of(with({"--sum", "s.npy"})), HasSubstr("--sum s.npy: needs"));
  EXPECT_THAT(error_of(with({"--normalize-output", "false", "--sum", "s.npy"})),
              HasSubstr("--maximum: got nothing"));
  EXPECT_THAT(error_of(with({"--normalize-output", "false", "--maximum", "m.npy"})),
              HasSubstr("--sum: got nothing"));
  EXPECT_THAT(error_of(with({"--normalize-output", "false", "--maximum", "m.npy", "--sum", "s.npy",
                             "--lse", "l.npy"})),
              AllOf(HasSubstr("--lse l.npy"), HasSubstr("maximum + log(sum)")));
}

TEST(Options, GivenListsWhatWasGivenWhereverFrom) {
  const Variable variable("ANNULUS_CAUSAL", "1");
  EXPECT_THAT(parse({"bench", "--mesh", "sp=4"}).given,
              AllOf(HasSubstr("--mesh=sp=4"), HasSubstr("--causal=1")));
}

TEST(Options, UnknownVariablesWarn) {
  const Variable known("ANNULUS_LOG_LEVEL", "off");
  const Variable unknown("ANNULUS_CASUAL", "1");
  const Options options = parse({"bench"});
  ASSERT_EQ(options.warnings.size(), 1U);
  EXPECT_THAT(options.warnings[0], HasSubstr("ANNULUS_CASUAL"));
}

TEST(Options, UnknownLogLevelWarns) {
  const Variable level("ANNULUS_LOG_LEVEL", "loud");
  const Options options = parse({"bench"});
  ASSERT_EQ(options.warnings.size(), 1U);
  EXPECT_THAT(options.warnings[0], AllOf(HasSubstr("ANNULUS_LOG_LEVEL"), HasSubstr("'loud'")));
}

TEST(Options, FilesOfTwoOptionsDiffer) {
  const Words run{"run", "--output", "o.safetensors"};
  const auto with = [&run](const Words& more) {
    Words words = run;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  EXPECT_EQ(parse(with({"--lse", "./o.safetensors"})).lse, "./o.safetensors");
  const Words unnormalised{"--normalize-output", "false", "--maximum", "./o.safetensors", "--sum"};
  const auto sum_in = [&](const char* file) {
    Words words = unnormalised;
    words.emplace_back(file);
    return with(words);
  };
  EXPECT_EQ(parse(sum_in("o.safetensors")).maximum, "./o.safetensors");
  EXPECT_EQ(parse(sum_in("s.npy")).sum, "s.npy");
  EXPECT_THAT(error_of(sum_in("s.txt")), AllOf(HasSubstr("--sum"), HasSubstr(".npy")));
  EXPECT_THAT(error_of({"run", "--output", "o.npy", "--normalize-output", "false", "--maximum",
                        "m.npy", "--sum", "./m.npy"}),
              AllOf(HasSubstr("--sum"), HasSubstr("--maximum")));
  EXPECT_THAT(error_of(with({"--query", "x/../o.safetensors"})),
              AllOf(HasSubstr("--output"), HasSubstr("--query")));
  EXPECT_THAT(error_of(with({"--trace", "j", "--json", "./j"})),
              AllOf(HasSubstr("--trace"), HasSubstr("--json")));
  EXPECT_THAT(error_of({"run", "--output", "o.txt"}),
              AllOf(HasSubstr("--output"), HasSubstr(".npy"), HasSubstr(".safetensors")));
  EXPECT_THAT(error_of({"run", "--input", "q.npy"}), HasSubstr("is not a .safetensors file"));
}

TEST(Options, ShapeWithSuffixes) {
  const AttentionShape shape = parse({"plan", "--shape", "2,1k,1M,64,8,128"}).shape.value();
  EXPECT_EQ(shape.batch, 2);
  EXPECT_EQ(shape.query_length, 1024);
  EXPECT_EQ(shape.kv_length, 1024 * 1024);
  EXPECT_EQ(shape.heads, 64);
  EXPECT_EQ(shape.kv_heads, 8);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.value_dim, 128);
  EXPECT_EQ(parse({"plan", "--shape", "1,4,4,1,1,8,16"}).shape->value_dim, 16);
}

TEST(Options, SizesInThousandsAndInPowersOf1024) {
  const auto length = [](const std::string& size) {
    return parse({"plan", "--shape", "1,1," + size + ",1,1,8"}).shape.value().kv_length;
  };
  EXPECT_EQ(length("2k"), 2048);
  EXPECT_EQ(length("2K"), 2048);
  EXPECT_EQ(length("3M"), std::int64_t{3} << 20);
  EXPECT_EQ(length("1G"), std::int64_t{1} << 30);
  EXPECT_EQ(length("1e6"), 1000000);
  EXPECT_EQ(length("2.5e3"), 2500);
  EXPECT_EQ(length("1E+2"), 100);
  EXPECT_EQ(parse({"bench", "--sweep", "1e3:1G:4"}).sequence_sweep->begin, 1000);
  EXPECT_EQ(parse({"plan", "--window", "4k,-1"}).window->left, 4096);
  EXPECT_EQ(parse({"plan", "--causal-offset", "-1e3"}).causal_offset->value, -1000);
}

TEST(Options, BlockMasks) {
  const Options options = parse({"plan", "--block-mask", "m.npy", "--block-size", "64,1k"});
  EXPECT_EQ(options.block_mask, "m.npy");
  EXPECT_EQ(options.block_size, (BlockSize{64, 1024}));
  EXPECT_EQ(parse({"run", "--block-size", "32"}).block_size, (BlockSize{32, 32}));
}

TEST(Options, WindowsAndOffsets) {
  const WindowSize both = parse({"plan", "--window", "100"}).window.value();
  EXPECT_EQ(both.left, 100);
  EXPECT_EQ(both.right, 100);
  const WindowSize open = parse({"plan", "--window", "-1,0"}).window.value();
  EXPECT_EQ(open.left, -1);
  EXPECT_EQ(open.right, 0);
  EXPECT_TRUE(parse({"plan", "--causal-offset", "bottom-right"}).causal_offset->bottom_right);
  EXPECT_EQ(parse({"plan", "--causal-offset", "-5"}).causal_offset->value, -5);
}

TEST(Options, LayoutsOfQueriesAndKeys) {
  const Options one = parse({"plan", "--sequence-layout", "striped"});
  EXPECT_EQ(one.sequence_layout, "striped");
  EXPECT_EQ(one.kv_sequence_layout, "auto");
  const Options two = parse({"plan", "--sequence-layout", "auto,zigzag", "--granule", "64"});
  EXPECT_EQ(two.sequence_layout, "auto");
  EXPECT_EQ(two.kv_sequence_layout, "zigzag");
  EXPECT_EQ(two.granule, 64);
}

TEST(Options, SpecsMayBeginWithNone) {
  EXPECT_EQ(parse({"plan", "--query-spec", "-,sp,-,-"}).query_spec, "-,sp,-,-");
}

TEST(Options, SweepsAndRandomCases) {
  const SweepRange sweep = parse({"bench", "--sweep", "1k:16k:4"}).sequence_sweep.value();
  EXPECT_EQ(sweep.begin, 1024);
  EXPECT_EQ(sweep.end, 16384);
  EXPECT_EQ(sweep.factor, 4);
  EXPECT_EQ(parse({"bench", "--sweep", "5:10"}).sequence_sweep->factor, 2);
  const RandomCase random =
      parse({"verify", "--random-case", "18446744073709551615:7"}).random_case.value();
  EXPECT_EQ(random.seed, 18446744073709551615U);
  EXPECT_EQ(random.index, 7);
}

struct BadValue {
  Words words;  // the value comes last
  const char* expected;
};

class OptionsBadValue : public ::testing::TestWithParam<BadValue> {};

TEST_P(OptionsBadValue, NamesOptionValueAndExpectation) {
  const BadValue& bad = GetParam();
  const std::string& option = bad.words[bad.words.size() - 2];
  const std::string& value = bad.words.back();
  std::string help;
  try {
    static_cast<void>(parse_options(bad.words, help));
    FAIL() << "no error";
  } catch (const ArgumentError& error) {
    EXPECT_THAT(error.argument(), HasSubstr(option));
    EXPECT_THAT(error.value(), HasSubstr(value));
    EXPECT_THAT(error.expected(), HasSubstr(bad.expected));
  }
}

const std::vector<BadValue> kBadValues{
    BadValue{{"plan", "--shape", "1,2,3"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,5,6,7,8"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,x"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,-3,4,4,8"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,3,8"}, "multiple of K"},
    BadValue{{"plan", "--shape", "1,2,3,4,0,8"}, "multiple of K"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,0"}, "D and Dv"},
    BadValue{{"plan", "--shape", "1,9999999999999999M,3,4,4,8"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,2.5"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,25e-1"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,1e99"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,1e3k"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,-1e3"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,nane"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,k"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,2,3,4,4,4G4"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", "1,999999999G,3,4,4,8"}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--shape", ""}, "B,T,S,N,K,D"},
    BadValue{{"plan", "--dtype", "int32"}, "float32, float16, bfloat16, float64"},
    BadValue{{"plan", "--mode", "training"}, "train, prefill, autoregressive, insert"},
    BadValue{{"plan", "--sequence-layout", "zig"}, "auto, zigzag, contiguous, striped, balanced"},
    BadValue{{"plan", "--sequence-layout", "zigzag,zigzag,zigzag"}, "a layout, or two"},
    BadValue{{"plan", "--granule", "0"}, "from 1"},
    BadValue{{"plan", "--ulysses-degree", "0"}, "from 1"},
    BadValue{{"plan", "--inner-size", "-1"}, "from 1"},
    BadValue{{"plan", "--schedule", "rings"}, "ring"},
    BadValue{{"plan", "--softmax-dtype", "float16"}, "float32, float64"},
    BadValue{{"plan", "--sharding-rules", "head"}, "JSON object"},
    BadValue{{"plan", "--sharding-rules", "{\"heads\":\"tp\"}"},
             "known keys: not 'sharding rules.heads' but"},
    BadValue{{"plan", "--sequence-axis", ""}, "a name"},
    BadValue{{"run", "--device", "gpu"}, "auto, cpu"},
    BadValue{{"info", "--rank-order", "host"}, "one of node, mpirun"},
    BadValue{{"run", "--transport", "mpi"}, "auto, composite, nccl, peer"},
    BadValue{{"run", "--tuning", "on"}, "off, cached, measure"},
    BadValue{{"run", "--share-gpus", "perhaps"}, "true"},
    BadValue{{"run", "--layout", "tbhd"}, "bthd, bhtd"},
    BadValue{{"run", "--threads", "-1"}, "from 0"},
    BadValue{{"run", "--threads", "two"}, "whole number"},
    BadValue{{"run", "--timeout", "0"}, "positive"},
    BadValue{{"run", "--timeout", "soon"}, "positive"},
    BadValue{{"run", "--timeout", "inf"}, "finite"},
    BadValue{{"run", "--scale", "nan"}, "finite"},
    BadValue{{"run", "--scale", "1.0x"}, "finite number"},
    BadValue{{"run", "--soft-cap", "-2"}, "positive"},
    BadValue{{"run", "--window", "-2"}, "-1"},
    BadValue{{"run", "--window", "1,2,3"}, "L,R"},
    BadValue{{"run", "--window", "--3"}, "L[,R]"},
    BadValue{{"run", "--window", ""}, "L,R"},
    BadValue{{"run", "--window", "3,"}, "L,R"},
    BadValue{{"run", "--block-size", "0,4"}, "Q,K"},
    BadValue{{"run", "--block-size", "64,64,64"}, "Q,K"},
    BadValue{{"run", "--block-size", "-1"}, "Q,K"},
    BadValue{{"run", "--block-size", "64,"}, "Q,K"},
    BadValue{{"run", "--causal-offset", "top-left"}, "bottom-right"},
    BadValue{{"run", "--causal-offset", "1e99"}, "bottom-right"},
    BadValue{{"run", "--causal", "maybe"}, "true or false"},
    BadValue{{"run", "--normalize-output", "never"}, "true or false"},
    BadValue{{"run", "--explain", "2"}, "true or false"},
    BadValue{{"run", "--wide", "x"}, "true or false"},
    BadValue{{"bench", "--legend", "x"}, "true or false"},
    BadValue{{"bench", "--hops", "all"}, "true or false"},
    BadValue{{"run", "--impl", "fastest"}, "native"},
    BadValue{{"run", "--kv-spec", "sp,,tp"}, ""},
    BadValue{{"plan", "--bias-spec", "sp,,tp"}, ""},
    BadValue{{"plan", "--mask-spec", "sp,,tp"}, ""},
    BadValue{{"run", "--dropout", "-0.1"}, "probability"},
    BadValue{{"run", "--dropout", "1"}, "probability"},
    BadValue{{"run", "--dropout", "half"}, "finite number"},
    BadValue{{"run", "--soft-cap", "0"}, "positive"},
    BadValue{{"run", "--scale", "inf"}, "finite"},
    BadValue{{"run", "--threads", "4097"}, "to 4096"},
    BadValue{{"run", "--query-spec", "sp,,tp"}, ""},
    BadValue{{"run", "--dropout", "1.5"}, "probability"},
    BadValue{{"verify", "--seed", "-1"}, "whole number"},
    BadValue{{"verify", "--seed", "18446744073709551616"}, "2^64-1"},
    BadValue{{"verify", "--random", "ten"}, "whole number"},
    BadValue{{"verify", "--random-case", "x:1"}, "SEED:INDEX"},
    BadValue{{"verify", "--random-case", "1:2:3"}, "SEED:INDEX"},
    BadValue{{"bench", "--sweep", "4"}, "BEGIN:END"},
    BadValue{{"bench", "--sweep", "4:x"}, "BEGIN:END"},
    BadValue{{"bench", "--sweep", "4:8:2:2"}, "BEGIN:END"},
    BadValue{{"run", "--bias-policy", "bias"}, "bias_wins"},
    BadValue{{"verify", "--random", "0"}, "from 1"},
    BadValue{{"verify", "--random-case", "5"}, "SEED:INDEX"},
    BadValue{{"verify", "--random-case", "5:-1"}, "SEED:INDEX"},
    BadValue{{"bench", "--iters", "0"}, "from 1"},
    BadValue{{"bench", "--warmup", "99999999999"}, "from 0"},
    BadValue{{"bench", "--sweep", "8:4"}, "BEGIN <= END"},
    BadValue{{"bench", "--sweep", "4:8:1"}, "FACTOR from 2 to 16384"},
    BadValue{{"bench", "--sweep", "0:8"}, "1 <= BEGIN"},
    BadValue{{"plan", "--ranks-per-node", "0"}, "from 1"},
    BadValue{{"plan", "--simulate", "perhaps"}, "true or false"},
    BadValue{{"plan", "--straggler-percent", "-1"}, "0 to 1000 percent"},
    BadValue{{"plan", "--straggler-percent", "few"}, "a finite number"},
    BadValue{{"plan", "--straggler-seed", "-1"}, "a whole number from 0"},
    BadValue{{"plan", "--recommend", "perhaps"}, "true or false"},
    BadValue{{"plan", "--ranks", "0"}, "from 1"},
    BadValue{{"plan", "--nodes", "0"}, "from 1"},
    BadValue{{"plan", "--memory", "much"}, "a size of 1 or more"},
    BadValue{{"plan", "--memory", "0"}, "a size of 1 or more"},
    BadValue{{"bench", "--scaling", "perhaps"}, "true or false"},
    BadValue{{"bench", "--tokens-per-rank", "0"}, "a size of 1 or more"},
    BadValue{{"plan", "--show-ranks", "-3"}, "from 0"}};

INSTANTIATE_TEST_SUITE_P(Values, OptionsBadValue, ::testing::ValuesIn(kBadValues));

bool has_bad_value(const std::string& option) {
  return std::any_of(kBadValues.begin(), kBadValues.end(), [&](const BadValue& bad) {
    return bad.words[bad.words.size() - 2] == option;
  });
}

// An empty name would pass for "not given".
TEST(Options, NamesOfFilesAreNotEmpty) {
  for (const OptionEntry& entry : option_table()) {
    if (entry.value != "FILE") continue;
    const std::string command(name_of(entry.commands.front()));
    EXPECT_THAT(error_of({command, "--" + entry.name, ""}),
                AllOf(HasSubstr("--" + entry.name), HasSubstr("a name")));
  }
}

// A new option comes with its errors: all but flags and the names of files, specs and meshes are
// among the bad values above.
TEST(Options, EveryOptionThatCanBeWrongHasABadValue) {
  for (const OptionEntry& entry : option_table()) {
    if (entry.value == "FILE" || entry.name == "mesh") continue;
    EXPECT_TRUE(has_bad_value("--" + entry.name)) << "--" << entry.name;
  }
}

TEST(Options, MessagesNameTheSource) {
  {
    const OptionFile config("window = wide\n");
    EXPECT_THAT(error_of({"plan", "--config", config.path()}),
                AllOf(HasSubstr("window in " + config.path()), HasSubstr("'wide'")));
  }
  const Variable variable("ANNULUS_WINDOW", "wide");
  EXPECT_THAT(error_of({"plan"}), AllOf(HasSubstr("ANNULUS_WINDOW"), HasSubstr("'wide'")));
}

TEST(Options, OptionFileErrors) {
  EXPECT_THAT(error_of({"plan", "--config", "/no/such.cfg"}),
              AllOf(HasSubstr("--config /no/such.cfg"), HasSubstr("No such file")));
  EXPECT_THAT(error_of({"plan", "--config", ::testing::TempDir()}), HasSubstr("Is a directory"));
  EXPECT_THAT(error_of({"plan", "--config", "/dev/zero"}), HasSubstr("longer than 4 MiB"));
  {
    const OptionFile config("causal\n");
    EXPECT_THAT(error_of({"plan", "--config", config.path()}), HasSubstr(config.path()));
  }
  {
    const OptionFile config("windoww = 3\n");
    EXPECT_THAT(error_of({"plan", "--config", config.path()}),
                AllOf(HasSubstr("windoww"), HasSubstr("--window")));
  }
  {
    const OptionFile config("mesh = sp=2\nmesh = sp=4\n");
    EXPECT_THAT(error_of({"plan", "--config", config.path()}), HasSubstr("given twice"));
  }
  const OptionFile config("config = other.cfg\n");
  EXPECT_THAT(error_of({"plan", "--config", config.path()}), HasSubstr("further --config"));
}

TEST(Options, UnknownOptionsAreNamedWithTheNearest) {
  EXPECT_THAT(error_of({"run", "--wndow", "3"}),
              AllOf(HasSubstr("--wndow"), HasSubstr("--window")));
  EXPECT_THAT(error_of({"run", "--causal", "--expalin"}),
              AllOf(HasSubstr("--expalin"), HasSubstr("--explain")));
  EXPECT_THAT(error_of({"run", "--win", "3"}), HasSubstr("--win"));  // no guessing
  EXPECT_THAT(error_of({"run", "file.npy"}), HasSubstr("file.npy"));
  EXPECT_THAT(error_of({"run", "-x"}), HasSubstr("-x"));
  EXPECT_THAT(error_of({"run", "--completely-else", "3"}), Not(HasSubstr("nearest")));
  EXPECT_THAT(error_of({"bananas"}), Not(HasSubstr("nearest")));
}

TEST(Options, OptionsOfOtherCommandsSaySo) {
  EXPECT_THAT(
      error_of({"run", "--iters", "3"}),
      AllOf(HasSubstr("--iters"), HasSubstr("annulus bench"), HasSubstr("not of annulus run")));
  EXPECT_THAT(error_of({"info", "--mesh", "sp=4"}), HasSubstr("not of annulus info"));
}

TEST(Options, MissingAndRepeatedValues) {
  EXPECT_THAT(error_of({"run", "--window"}), AllOf(HasSubstr("--window"), HasSubstr("L[,R]")));
  EXPECT_THAT(error_of({"run", "--window", "--causal"}), HasSubstr("--window"));
  EXPECT_THAT(error_of({"run", "--window", "1", "--window", "2"}), HasSubstr("given twice"));
}

TEST(Options, AForgottenValueDoesNotTakeTheNextOption) {
  for (const char* const option : {"--json", "--csv", "--trace", "--output"}) {
    EXPECT_THAT(error_of({"run", option, "--causal"}),
                AllOf(HasSubstr(option), HasSubstr("'--causal'"), HasSubstr("the next option"),
                      HasSubstr("FILE")));
  }
  EXPECT_THAT(error_of({"run", "--json=--csv"}), HasSubstr("--json: got '--csv'"));
  EXPECT_EQ(parse({"run", "--json", "./--csv"}).json, "./--csv");
}

struct Idle {
  Words words;
  std::string option;  // that has no effect
  std::string cause;   // why
  std::string needed;
};

TEST(Options, OptionsWithoutAnEffectAreRefused) {
  const std::string random = "random:";
  const std::vector<Idle> all{
      {{"plan", "--schedule", "ring", "--ulysses-degree", "2"},
       "--ulysses-degree",
       "--schedule ring",
       "--schedule hybrid or auto"},
      {{"run", "--impl", "ring", "--ulysses-degree", "2"},
       "--ulysses-degree",
       "--impl ring",
       "--schedule hybrid or auto"},
      {{"bench", "--schedule", "hybrid", "--inner-size", "2"},
       "--inner-size",
       "--schedule hybrid",
       "--schedule double_ring or auto"},
      {{"run", "--mode", "train", "--query-spec", "-,sp", "--kv-spec", "-,sp"},
       "--mode",
       "--query-spec and --kv-spec",
       "default"},
      {{"run", "--sharding-rules", "{\"head\":\"tp\"}", "--query-spec", "-,sp", "--kv-spec",
        "-,sp"},
       "--sharding-rules",
       "--query-spec and --kv-spec",
       "default"},
      {{"run", "--sequence-axis", "x", "--mesh", "x=2", "--query-spec", "-,x", "--kv-spec", "-,x"},
       "--sequence-axis",
       "--mesh",
       "default"},
      {{"run", "--tuning-cache", "t.json"}, "--tuning-cache", "--tuning", "cached or measure"},
      {{"plan", "--simulate", "--straggler-seed", "4"},
       "--straggler-seed",
       "--straggler-percent",
       "above 0"},
      {{"plan", "--nodes", "1"}, "--nodes", "--recommend", "--ranks"},
      {{"run", "--seed", "4"}, "--seed", "nothing is drawn", random},
      {{"verify", "--random-case", "1:2", "--seed", "4"}, "--seed", "--random-case", "without"},
      {{"verify", "--random", "3", "--explain"}, "--explain", "--random", "without"},
      {{"bench", "--scaling", "--sweep", "1k:2k"}, "--sweep", "--scaling", "--tokens-per-rank"},
      {{"bench", "--scaling", "--explain"}, "--explain", "--scaling", "without"},
      {{"plan", "--scaling", "--ranks", "4", "--show-ranks", "2"},
       "--show-ranks",
       "--scaling",
       "without"},
      {{"plan", "--recommend", "--ranks", "4", "--explain"}, "--explain", "--recommend", "without"},
      {{"plan", "--simulate", "--explain"}, "--explain", "--simulate", "without"},
      {{"bench", "--hops", "--shape", "1,8,8,4,4,8"}, "--shape", "--hops", "--sweep"},
      {{"bench", "--hops", "--threads", "2"}, "--threads", "--hops", "without"},
      {{"bench", "--calibrate", "m.json", "--schedule", "ring"},
       "--schedule",
       "--calibrate",
       "without"},
  };
  for (const Idle& idle : all) {
    EXPECT_THAT(error_of(idle.words), AllOf(HasSubstr(idle.option + ": has no effect"),
                                            HasSubstr(idle.cause), HasSubstr(idle.needed)));
  }
}

TEST(Options, OptionsWithAnEffectAreTaken) {
  EXPECT_EQ(parse({"plan", "--ulysses-degree", "2"}).ulysses_degree, 2);
  EXPECT_EQ(parse({"plan", "--inner-size", "2", "--schedule", "double_ring"}).inner_size, 2);
  EXPECT_EQ(parse({"plan", "--mode", "train", "--query-spec", "-,sp"}).mode, "train");
  EXPECT_EQ(parse({"run", "--seed", "3", "--mask", "random:0.5"}).seed, 3U);
  EXPECT_EQ(parse({"verify", "--seed", "3"}).seed, 3U);
  EXPECT_EQ(parse({"run", "--tuning", "cached", "--tuning-cache", "t.json"}).tuning_cache,
            "t.json");
  EXPECT_FALSE(parse({"plan", "--simulate", "--explain=false"}).explain);
  EXPECT_TRUE(parse({"bench", "--hops", "--sweep", "1k:2k", "--iters", "2"}).hops);
}

// They may serve commands for which the option has an effect.
TEST(Options, SettingsOfEnvironmentAndFilesNeedNoEffect) {
  const Variable cache("ANNULUS_TUNING_CACHE", "t.json");
  const OptionFile config("ulysses-degree = 2\n");
  const Options options = parse({"run", "--schedule", "ring", "--config", config.path()});
  EXPECT_EQ(options.tuning_cache, "t.json");
  EXPECT_EQ(options.ulysses_degree, 2);
}

TEST(Options, PicturesAreSvg) {
  EXPECT_EQ(parse({"plan", "--simulate", "--picture", "p.svg"}).picture, "p.svg");
  EXPECT_THAT(error_of({"plan", "--simulate", "--picture", "ring.png"}),
              AllOf(HasSubstr("--picture"), HasSubstr("'ring.png'"), HasSubstr(".svg")));
}

TEST(Options, OptionsThatExcludeEachOther) {
  EXPECT_THAT(error_of({"run", "--json", "-", "--csv", "-"}), HasSubstr("--csv"));
  EXPECT_THAT(error_of({"run", "--input", "x.safetensors", "--key", "k.npy"}),
              HasSubstr("--input"));
  EXPECT_THAT(error_of({"verify", "--random", "3", "--random-case", "1:1"}),
              HasSubstr("--random-case"));
}

TEST(Options, TransportsBetweenGpus) {
  EXPECT_EQ(parse({"bench"}).transport, Transport::automatic);
  EXPECT_EQ(parse({"run", "--transport", "nccl"}).transport, Transport::nccl);
  EXPECT_EQ(parse({"verify", "--transport", "peer", "--device", "cuda"}).transport,
            Transport::peer);
  EXPECT_FALSE(parse({"bench", "--transport", "peer"}).share_gpus);
  const Options shared = parse({"bench", "--share-gpus"});
  EXPECT_TRUE(shared.share_gpus);
  EXPECT_EQ(shared.transport, Transport::peer);
  EXPECT_EQ(parse({"bench", "--device", "cpu", "--transport", "auto"}).transport,
            Transport::automatic);
  EXPECT_EQ(parse({"bench", "--share-gpus", "--transport", "composite"}).transport,
            Transport::composite);
  EXPECT_THAT(error_of({"bench", "--calibrate", "model.json", "--transport", "composite"}),
              HasSubstr("--calibrate measures peer and nccl"));
  EXPECT_THAT(error_of({"bench", "--share-gpus", "--transport", "nccl"}),
              AllOf(HasSubstr("--transport"), HasSubstr("--share-gpus")));
  for (const char* const name : {"composite", "nccl", "peer"}) {
    EXPECT_THAT(error_of({"run", "--device", "cpu", "--transport", name}),
                AllOf(HasSubstr(name), HasSubstr("needs GPU ranks")));
  }
  EXPECT_THAT(error_of({"run", "--device", "cpu", "--share-gpus"}),
              AllOf(HasSubstr("--share-gpus"), HasSubstr("needs GPU ranks")));
  EXPECT_EQ(parse({"plan", "--device", "cuda", "--transport", "nccl"}).transport, Transport::nccl);
  EXPECT_THAT(error_of({"plan", "--transport", "peer"}), HasSubstr("needs --device cuda"));
  EXPECT_THAT(error_of({"plan", "--share-gpus"}), HasSubstr("not of annulus plan"));
}

TEST(Options, Schedules) {
  const Options defaults = parse({"run"});
  EXPECT_EQ(defaults.ulysses_degree, 0);
  EXPECT_EQ(defaults.inner_size, 0);
  const Options options = parse({"run", "--schedule", "hybrid", "--ulysses-degree", "2"});
  EXPECT_EQ(options.schedule, "hybrid");
  EXPECT_EQ(options.ulysses_degree, 2);
  EXPECT_EQ(parse({"run", "--schedule", "double_ring", "--inner-size", "4"}).inner_size, 4);
  EXPECT_THROW((void)parse({"run", "--ulysses-degree", "0"}), ArgumentError);
  EXPECT_THROW((void)parse({"run", "--inner-size", "-1"}), ArgumentError);
}

TEST(Options, Dropout) {
  EXPECT_EQ(parse({"run"}).dropout, 0);
  const Options options = parse({"run", "--dropout", "0.25", "--seed", "7"});
  EXPECT_EQ(options.dropout, 0.25);
  EXPECT_EQ(options.seed, 7U);
}

TEST(Options, BiasAndMask) {
  EXPECT_EQ(parse({"plan", "--bias-spec", "-,tp,sp,-"}).bias_spec, "-,tp,sp,-");
  EXPECT_EQ(parse({"bench", "--mask-spec=dp"}).mask_spec, "dp");
  EXPECT_EQ(parse({"run"}).mask_spec, std::nullopt);
  EXPECT_THAT(error_of({"run", "--bias-spec", "sp,sp"}), HasSubstr("--bias-spec"));
  EXPECT_EQ(parse({"run"}).bias_policy, BiasPolicy::combine);
  const Options options =
      parse({"run", "--bias", "b.npy", "--mask", "m.npy", "--bias-policy", "bias_disables_causal"});
  EXPECT_EQ(options.bias, "b.npy");
  EXPECT_EQ(options.mask, "m.npy");
  EXPECT_EQ(options.bias_policy, BiasPolicy::bias_disables_causal);
  EXPECT_EQ(parse({"run", "--bias-policy", "bias_wins"}).bias_policy, BiasPolicy::bias_wins);
  EXPECT_THAT(error_of({"run", "--bias-policy", "bias"}),
              AllOf(HasSubstr("--bias-policy"), HasSubstr("'bias'"), HasSubstr("bias_wins")));
}

TEST(Options, Commands) {
  EXPECT_THAT(error_of({}), HasSubstr("run, verify, bench, plan or info"));
  EXPECT_THAT(error_of({"rnu"}), AllOf(HasSubstr("'rnu'"), HasSubstr("nearest is run")));
  EXPECT_THAT(error_of({"--mesh", "sp=4"}), HasSubstr("'--mesh'"));
}

TEST(Options, Help) {
  EXPECT_THAT(help_of({"--help"}), AllOf(HasSubstr("verify"), HasSubstr("Exit codes")));
  EXPECT_THAT(help_of({"--version"}), ::testing::MatchesRegex("annulus [0-9.]+\n"));
  const std::string run = help_of({"run", "--help"});
  EXPECT_THAT(run,
              AllOf(HasSubstr("--query-spec"), HasSubstr("(default: 300)"), HasSubstr("SECONDS"),
                    Not(HasSubstr("--iters")), Not(HasSubstr("--shape"))));
  EXPECT_THAT(help_of({"bench", "--help"}),
              AllOf(HasSubstr("--iters"), HasSubstr("(default: 10)"), Not(HasSubstr("--output"))));
  EXPECT_THAT(help_of({"info", "-h"}), AllOf(HasSubstr("--json"), Not(HasSubstr("--mesh"))));
  EXPECT_EQ(run, help_of({"run", "--mesh", "sp=4", "--help"}));
  EXPECT_EQ(run, help_of({"help", "run"}));
  EXPECT_EQ(help_of({"--help"}), help_of({"help"}));
  EXPECT_THAT(error_of({"help", "rnu"}), AllOf(HasSubstr("'rnu'"), HasSubstr("nearest is run")));
  EXPECT_THAT(error_of({"help", "run", "--mesh"}), HasSubstr("annulus help COMMAND"));
}

}  // namespace
}  // namespace annulus::launcher
