// Tests of what options refuse, and how.
#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/tuning.hpp>

#include "launcher/options/file_names.hpp"
#include "launcher/options/option_table.hpp"
#include "tests/launcher/options/parsing.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus::launcher {
namespace {

using ::testing::StartsWith;

struct BadValues {
  std::string line;  // a command and an option
  std::vector<std::string> values;
  std::string expected;
};

const std::vector<BadValues> kBadValues{
    {"plan --shape",
     {"1,2,3", "1,2,3,4,5,6,7,8", "1,2,3,4,4,x", "1,2,-3,4,4,8", "1,9999999999999999M,3,4,4,8",
      "1,2,3,4,4,2.5", "1,2,3,4,4,25e-1", "1,2,3,4,4,1e99", "1,2,3,4,4,1e3k", "1,2,3,4,4,-1e3",
      "1,2,3,4,4,nane", "1,2,3,4,4,k", "1,2,3,4,4,4G4", "1,999999999G,3,4,4,8", ""},
     "B,T,S,N,K,D"},
    {"plan --shape", {"1,2,3,4,3,8", "1,2,3,4,0,8"}, "multiple of K"},
    {"plan --shape", {"1,2,3,4,4,0"}, "D and Dv"},
    {"plan --dtype", {"int32"}, "float32, float16, bfloat16, float64"},
    {"plan --mode", {"training"}, "train, prefill, autoregressive, insert"},
    {"plan --sequence-layout", {"zig"}, "auto, zigzag, contiguous, striped, balanced"},
    {"plan --sequence-layout", {"zigzag,zigzag,zigzag"}, "a layout, or two"},
    {"plan --granule", {"0", "2T"}, "1 or more"},
    {"plan --granule", {"2e12"}, "up to 2^40"},
    {"plan --ulysses-degree", {"0"}, "from 1"},
    {"plan --inner-size", {"-1"}, "from 1"},
    {"plan --schedule", {"rings"}, "ring"},
    {"plan --softmax-dtype", {"float16"}, "float32, float64"},
    {"plan --sharding-rules", {"head"}, "JSON text (not a file)"},
    {"plan --sequence-axis", {""}, "a name"},
    {"run --device", {"tpu"}, "auto, cpu"},
    {"info --rank-order", {"host"}, "one of node, mpirun"},
    {"run --transport", {"mpi"}, "auto, composite, nccl, peer"},
    {"run --tuning", {"on"}, "off, cached, measure"},
    {"run --layout", {"tbhd"}, "bthd, bhtd"},
    {"run --threads", {"-1"}, "from 0"},
    {"run --threads", {"two"}, "whole number"},
    {"run --timeout", {"0", "soon"}, "positive"},
    {"run --timeout", {"inf"}, "a positive time"},
    {"run --scale", {"nan", "inf"}, "finite"},
    {"run --scale", {"1.0x"}, "finite number"},
    {"run --soft-cap", {"-2", "0"}, "positive"},
    {"run --window", {"-2"}, "-1"},
    {"run --window", {"1,2,3", "", "3,"}, "L,R"},
    {"run --window", {"--3"}, "L[,R]"},
    {"run --block-size", {"0,4", "64,64,64", "-1", "64,"}, "Q,K"},
    {"run --causal-offset", {"left", "1e99"}, "bottom-right"},
    {"run --prefix", {"-1"}, "0 or more"},
    {"run --prefix", {"file.txt"}, ".npy"},
    {"run --sink-tokens", {"-1"}, "1 or more"},
    {"run --chunk", {"0"}, "1 or more"},
    {"run --normalize-output", {"never"}, "true or false"},
    {"run --repeat", {"0"}, "from 1"},
    {"run --layer", {"-1"}, "a whole number from 0"},
    {"run --grad-wire", {"float16"}, "float32"},
    {"plan --reproducible", {"always"}, "no, run, world"},
    {"run --impl", {"fastest"}, "native"},
    {"run --kv-spec", {"sp,,tp"}, ""},
    {"run --dropout", {"-0.1", "1", "1.5"}, "probability"},
    {"run --dropout", {"half"}, "finite number"},
    {"run --threads", {"4097"}, "to 4096"},
    {"run --query-spec", {"sp,,tp"}, ""},
    {"verify --seed", {"-1"}, "whole number"},
    {"verify --seed", {"18446744073709551616"}, "2^64-1"},
    {"verify --random", {"ten"}, "whole number"},
    {"verify --random-case", {"x:1", "1:2:3", "5", "5:-1"}, "SEED:INDEX"},
    {"bench --sweep", {"4", "4:x", "4:8:2:2"}, "BEGIN:END"},
    {"run --bias-policy", {"bias"}, "bias_wins"},
    {"run --kv-lengths", {"700,800", "700"}, "a .npy or .safetensors file that holds the numbers"},
    {"run --causal-offset", {"3,4"}, "file with one number for each batch"},
    {"run --prefix", {"3,4"}, "file with one for each batch"},
    {"verify --random", {"0"}, "from 1"},
    {"bench --iters", {"0"}, "from 1"},
    {"bench --warmup", {"99999999999"}, "from 0"},
    {"bench --warm-seconds", {"0"}, "a positive time"},
    {"bench --sweep", {"8:4"}, "BEGIN <= END"},
    {"bench --sweep", {"4:8:1", "64k:1M:281474976710656"}, "FACTOR from 2 to 16384"},
    {"bench --sweep", {"0:8"}, "1 <= BEGIN"},
    {"plan --ranks-per-node", {"0"}, "from 1"},
    {"plan --straggler-percent", {"-1"}, "0 to 1000 percent"},
    {"plan --straggler-percent", {"few"}, "a finite number"},
    {"plan --straggler-seed", {"-1"}, "a whole number from 0"},
    {"plan --ranks", {"0"}, "from 1"},
    {"plan --nodes", {"0"}, "from 1"},
    {"plan --max-tp", {"0"}, "from 1"},
    {"plan --memory", {"much"}, "bytes, such as 80GB"},
    {"plan --memory", {"0"}, "bytes"},
    {"bench --tokens-per-rank", {"0"}, "a size of 1 or more"},
    {"plan --show-ranks", {"-3"}, "from 0"}};

TEST(OptionErrors, BadValuesNameOptionValueAndExpectation) {
  for (const BadValues& bad : kBadValues) {
    const std::string option = bad.line.substr(bad.line.find("--"));
    for (const std::string& value : bad.values) {
      const auto error = test::thrown_by<ArgumentError>([&] { parse(bad.line + ' ' + value); });
      EXPECT_THAT(error.argument(), HasSubstr(option));
      EXPECT_THAT(error.value(), HasSubstr(value));
      EXPECT_THAT(error.expected(), HasSubstr(bad.expected)) << option << ' ' << value;
    }
  }
}

bool has_bad_value(const std::string& option) {
  return std::ranges::any_of(
      kBadValues, [&](const BadValues& bad) { return bad.line.ends_with(' ' + option); });
}

// An empty name would pass for "not given".
TEST(OptionErrors, NamesOfFilesAreNotEmpty) {
  for (const OptionEntry& entry : option_table()) {
    if (entry.value != "FILE") continue;
    const std::string command(name_of(entry.uses.commands.front()));
    EXPECT_THAT(error_of(command + " --" + entry.name + " "),
                AllOf(HasSubstr("--" + entry.name), HasSubstr("a name")));
  }
}

TEST(OptionErrors, FlagsAreOnOrOff) {
  for (const OptionEntry& entry : option_table()) {
    if (!entry.is_flag()) continue;
    const std::string command(name_of(entry.uses.commands.front()));
    EXPECT_THAT(error_of(command + " --" + entry.name + "=perhaps"),
                HasSubstr("--" + entry.name + ": got 'perhaps', expected true or false"));
  }
}

// A file may have a number as its name; "./" then says that the value is a name. Values that begin
// with random: are not numbers.
TEST(OptionErrors, NumbersAreNotNamesOfArrays) {
  for (const OptionEntry& entry : option_table()) {
    if (entry.group.find("npy") == std::string::npos || entry.value != "FILE") continue;
    if (entry.name == "input") continue;  // a file of several arrays
    const std::string line = "run --" + entry.name + ' ';
    EXPECT_THAT(error_of(line + "0.5"), HasSubstr("--" + entry.name + ": got '0.5', expected"));
    EXPECT_NO_THROW(parse(line + "./0.5"));
  }
  EXPECT_EQ(parse("run --mask random:0.5").mask, "random:0.5");
}

// A new option comes with its errors: all but flags, the names of files and meshes are among the
// bad values above.
TEST(OptionErrors, EveryOptionThatCanBeWrongHasABadValue) {
  for (const OptionEntry& entry : option_table()) {
    if (entry.is_flag() || entry.value == "FILE" || entry.name == "mesh") continue;
    EXPECT_TRUE(has_bad_value("--" + entry.name)) << "--" << entry.name;
  }
}

TEST(OptionErrors, MessagesNameTheSource) {
  {
    const OptionFile config("window = wide\n");
    EXPECT_THAT(error_of("plan --config " + config.path()),
                AllOf(HasSubstr("window in " + config.path()), HasSubstr("'wide'")));
  }
  const Variable variable("ANNULUS_WINDOW", "wide");
  EXPECT_THAT(error_of("plan"), AllOf(HasSubstr("ANNULUS_WINDOW"), HasSubstr("'wide'")));
}

TEST(OptionErrors, OptionFileErrors) {
  EXPECT_THAT(error_of("plan --config /no/such.cfg"),
              AllOf(HasSubstr("--config /no/such.cfg"), HasSubstr("No such file")));
  EXPECT_THAT(error_of("plan --config " + ::testing::TempDir()), HasSubstr("Is a directory"));
  EXPECT_THAT(error_of("plan --config /dev/zero"), HasSubstr("longer than 4 MiB"));
  {
    const OptionFile config("causal\n");
    EXPECT_THAT(error_of("plan --config " + config.path()), HasSubstr(config.path()));
  }
  {
    const OptionFile config("windoww = 3\n");
    EXPECT_THAT(error_of("plan --config " + config.path()),
                AllOf(HasSubstr("windoww"), HasSubstr("--window")));
  }
  for (const auto& [content, expected] :
       {std::pair<std::string, const char*>{"mesh = sp=2\nmesh = sp=4\n", "given twice"},
        {"config = other.cfg\n", "further --config"},
        {std::string("mesh = sp=4\n\0\x1b[2J\n", 17), "line 2: is not text"},
        {"[plan]\nmesh = sp=4\n", "line 1: a [section]"},
        {"mesh = sp=4\n\xff\xfe = 3\n", "line 2: expected name = value"}}) {
    const OptionFile config(content);
    EXPECT_THAT(error_of("plan --config " + config.path()), HasSubstr(expected));
  }
}

TEST(OptionErrors, UnknownOptionsAreNamedWithTheNearest) {
  EXPECT_THAT(error_of("run --wndow 3"), AllOf(HasSubstr("--wndow"), HasSubstr("--window")));
  EXPECT_THAT(error_of("run --causal --expalin"),
              AllOf(HasSubstr("--expalin"), HasSubstr("--explain")));
  EXPECT_THAT(error_of("run --win 3"), HasSubstr("--win"));  // no guessing
  EXPECT_THAT(error_of("run file.npy"), HasSubstr("file.npy"));
  EXPECT_THAT(error_of("run -x"), HasSubstr("-x"));
  EXPECT_THAT(error_of("run --completely-else 3"), Not(HasSubstr("nearest")));
  EXPECT_THAT(error_of("bananas"), Not(HasSubstr("nearest")));
}

TEST(OptionErrors, OptionsOfOtherCommandsSaySo) {
  EXPECT_THAT(error_of("run --iters 3"), AllOf(HasSubstr("--iters"), HasSubstr("annulus bench"),
                                               HasSubstr("not of annulus run")));
  EXPECT_THAT(error_of("info --mesh sp=4"), HasSubstr("not of annulus info"));
  // One process plans for all ranks, and waits for none.
  EXPECT_THAT(error_of("plan --timeout 5"), HasSubstr("not of annulus plan"));
}

TEST(OptionErrors, MissingAndRepeatedValues) {
  EXPECT_THAT(error_of("run --window"), AllOf(HasSubstr("--window"), HasSubstr("L[,R]")));
  EXPECT_THAT(error_of("run --window --causal"), HasSubstr("--window"));
  EXPECT_THAT(error_of("run --window 1 --window 2"), HasSubstr("given twice"));
}

TEST(OptionErrors, AForgottenValueDoesNotTakeTheNextOption) {
  for (const char* const option : {"--json", "--csv", "--trace", "--output"}) {
    EXPECT_THAT(error_of(fmt::format("run {} --causal", option)),
                AllOf(HasSubstr(option), HasSubstr("'--causal'"), HasSubstr("the next option"),
                      HasSubstr("FILE")));
  }
  EXPECT_THAT(error_of("run --json=--csv"), HasSubstr("--json: got '--csv'"));
  EXPECT_EQ(parse("run --json ./--csv").json, "./--csv");
}

struct Idle {
  std::string line;
  std::string option;  // that has no effect, with its value
  std::string cause;   // why
  std::string needed;
};

TEST(OptionErrors, OptionsWithoutAnEffectAreRefused) {
  const std::string random = "random:";
  const std::string specs = " --query-spec -,x --kv-spec -,x";
  const std::vector<Idle> all{
      {"plan --schedule ring --ulysses-degree 2", "--ulysses-degree 2", "--schedule ring",
       "--schedule hybrid or auto"},
      {"run --impl ring --ulysses-degree 2", "--ulysses-degree 2", "--impl ring",
       "--schedule hybrid or auto"},
      {"bench --schedule hybrid --inner-size 2", "--inner-size 2", "--schedule hybrid",
       "--schedule double_ring or auto"},
      {"run --mode train" + specs, "--mode train", "--query-spec and --kv-spec", "default"},
      {"run --sharding-rules {\"head\":\"tp\"}" + specs, "--sharding-rules {\"head\":\"tp\"}",
       "--query-spec and --kv-spec", "default"},
      {"run --sequence-axis x --mesh x=2" + specs, "--sequence-axis x", "--mesh", "default"},
      {"run --tuning-cache t.json", "--tuning-cache t.json", "--tuning", "cached or measure"},
      {"run --causal-offset 3", "--causal-offset 3", "--causal, --window or --chunk",
       "one of them"},
      {"run --prefix 3", "--prefix 3", "--causal, --window or --chunk", "one of them"},
      {"run --causal --sink-tokens 3", "--sink-tokens 3", "--window or --chunk", "one of them"},
      {"plan --simulate --straggler-seed 4", "--straggler-seed 4", "without --straggler-percent",
       "--simulate"},
      {"plan --straggler-percent 0", "--straggler-percent 0", "without", "--simulate"},
      {"plan --max-tp 1", "--max-tp 1", "without", "--recommend"},
      {"plan --recommend --mesh sp=2 --max-tp 1", "--max-tp 1", "--mesh", "effect"},
      {"plan --memory 8G", "--memory 8G", "without", "--recommend"},
      {"plan --trace t.json", "--trace t.json", "without", "--simulate"},
      {"plan --csv p.csv", "--csv p.csv", "without", "--recommend or --scaling"},
      {"bench --tokens-per-rank 1k", "--tokens-per-rank 1k", "without", "--scaling"},
      {"run --seed 4", "--seed 4", "nothing is drawn", random},
      {"verify --random-case 1:2 --seed 4", "--seed 4", "--random-case", "without"},
      {"verify --random 3 --explain", "--explain", "--random", "without"},
      {"plan --scaling --ranks 4 --backward", "--backward", "--scaling", "forward"},
      {"plan --device cuda --threads 4", "--threads 4", "--device cuda", "--device cpu"},
      {"bench --scaling --backward", "--backward", "--scaling", "forward passes"},
      {"bench --calibrate m.json --deterministic", "--deterministic", "--calibrate", "one by one"},
      {"plan --grad-wire bfloat16", "--grad-wire bfloat16", "--backward", "no effect"},
      {"run --grad-wire bfloat16", "--grad-wire bfloat16", "--grad-output", "no effect"},
      {"bench --calibrate m.json --warm-seconds 1", "--warm-seconds 1", "--calibrate",
       "one by one"},
      {"bench --once --iters 3", "--iters 3", "--once", "first calls"},
      {"bench --deterministic", "--deterministic", "--backward", "no effect"},
      {"plan --deterministic", "--deterministic", "--backward", "no effect"},
      {"verify --random 3 --backward=false --deterministic", "--deterministic", "--backward",
       "no effect"},
      {"bench --backward --deterministic --reproducible run", "--deterministic", "--reproducible",
       "no effect"},
      {"bench --scaling --sweep 1k:2k", "--sweep 1k:2k", "--scaling", "--tokens-per-rank"},
      {"bench --scaling --explain", "--explain", "--scaling", "without"},
      {"bench --scaling --trace t", "--trace t", "--scaling", "many problems"},
      {"bench --scaling --mesh sp=2", "--mesh sp=2", "--scaling", "own meshes"},
      {"plan --scaling --ranks 4 --show-ranks 2", "--show-ranks 2", "--scaling", "without"},
      {"plan --recommend --ranks 4 --explain", "--explain", "--recommend", "without"},
      {"plan --recommend --query-spec sp", "--query-spec sp", "--recommend", "meshes"},
      {"plan --simulate --explain", "--explain", "--simulate", "without"},
      {"bench --hops --shape 1,8,8,4,4,8", "--shape 1,8,8,4,4,8", "--hops", "--sweep"},
      {"run --grad-query q.npy", "--grad-query q.npy", "without --grad-output", "--grad-output"},
      {"run --grad-bias b.npy", "--grad-bias b.npy", "without --grad-output", "--grad-output"},
      {"run --grad-output g.npy --grad-sinks s.npy", "--grad-sinks s.npy", "without", "--sinks"},
      {"run --forward-output o.npy", "--forward-output o.npy", "without", "--grad-output"},
      {"run --grad-output g.npy --forward-output o.npy --output p.npy", "--output p.npy",
       "--forward-output", "no forward pass"},
      {"bench --hops --threads 2", "--threads 2", "--hops", "without"},
      {"bench --hops --trace t.json", "--trace t.json", "--hops", "without"},
      {"bench --calibrate m.json --schedule ring", "--schedule ring", "--calibrate", "without"},
  };
  for (const Idle& idle : all) {
    EXPECT_THAT(error_of(idle.line), AllOf(StartsWith(idle.option + ": has no effect "),
                                           HasSubstr(idle.cause), HasSubstr(idle.needed)));
  }
}

TEST(OptionErrors, WhatOnlyTablesShowIsRefusedWhereThereIsNone) {
  for (const char* const report : {"--json", "--csv"}) {
    for (const char* const command : {"run", "verify", "bench"}) {
      for (const char* const option : {"--wide", "--legend"}) {
        const std::string words = fmt::format("{} {} ", command, report);
        EXPECT_THAT(error_of(words + "- " + option),
                    AllOf(StartsWith(std::string(option) + ": has no effect with " + report),
                          HasSubstr("replaces the table")));
        EXPECT_NO_THROW(parse(words + "file " + option));
        EXPECT_NO_THROW(parse(words + "- " + option + "=false"));
      }
    }
  }
  EXPECT_THAT(error_of("plan --json - --show-ranks 2"),
              HasSubstr("--show-ranks 2: has no effect with --json -"));
  EXPECT_THAT(error_of("plan --json - --explain"),
              HasSubstr("--explain: has no effect with --json -, which explains"));
  // A JSON report of other commands holds what --explain says; rows of CSV do not.
  EXPECT_TRUE(parse("bench --json - --explain").explain);
  EXPECT_TRUE(parse("bench --json file --csv - --explain").explain);
  EXPECT_THAT(error_of("bench --csv - --explain"),
              HasSubstr("--explain: has no effect with --csv -"));
}

// Measuring would compute, and write the cache.
TEST(OptionErrors, ADryRunMeasuresNothing) {
  const auto refused = AllOf(HasSubstr("--tuning measure: "), HasSubstr("--dry-run"));
  EXPECT_THAT(error_of("run --dry-run --tuning measure"), refused);
  EXPECT_NO_THROW(parse("run --dry-run --tuning cached"));
  EXPECT_NO_THROW(parse("run --dry-run=false --tuning measure"));
  const Variable policy("ANNULUS_TUNING", "measure");
  EXPECT_THAT(error_of("run --dry-run"), refused);
  EXPECT_NO_THROW(parse("run --dry-run --tuning off"));
}

// A script may try values of an option, of which one switches off what other options need.
TEST(OptionErrors, AnOptionThatIsSwitchedOffIsStillThereForThoseThatNeedIt) {
  for (const char* const dropout : {"0", "0.1", "0.3"}) {
    const Options options = parse(fmt::format("run --dropout {} --seed 7", dropout));
    EXPECT_EQ(options.dropout, std::stod(dropout));
    EXPECT_EQ(options.seed, 7U);
  }
  for (const char* const percent : {"0", "5"}) {
    EXPECT_EQ(
        parse(fmt::format("plan --simulate --straggler-percent {} --straggler-seed 4", percent))
            .straggler_seed,
        4U);
  }
  for (const char* const policy : {"off", "cached", "measure"}) {
    EXPECT_EQ(parse(fmt::format("run --tuning {} --tuning-cache t.json", policy)).tuning_cache,
              "t.json");
  }
  for (const char* const causal : {"--causal=false", "--causal=true", "--window=-1"}) {
    EXPECT_TRUE(parse(fmt::format("plan {} --causal-offset 3", causal)).causal_offset);
    EXPECT_TRUE(parse(fmt::format("plan {} --prefix 3", causal)).prefix);
  }
}

TEST(OptionErrors, OptionsWithAnEffectAreTaken) {
  EXPECT_EQ(parse("plan --ulysses-degree 2").ulysses_degree, 2);
  const Options ring = parse("plan --inner-size 2 --schedule double_ring");
  EXPECT_EQ(ring.inner_size, 2);
  EXPECT_EQ(ring.schedule, "double_ring");
  EXPECT_EQ(parse("plan --mode train --query-spec -,sp").mode, "train");
  EXPECT_EQ(parse("run --seed 3 --mask random:0.5").seed, 3U);
  EXPECT_EQ(parse("verify --seed 3").seed, 3U);
  EXPECT_EQ(parse("run --tuning cached --tuning-cache t.json").tuning_cache, "t.json");
  EXPECT_FALSE(parse("plan --simulate --explain=false").explain);
  EXPECT_TRUE(parse("bench --hops --sweep 1k:2k --iters 2").hops);
}

// Such settings may serve commands for which they have an effect.
TEST(OptionErrors, SettingsOfEnvironmentAndFilesNeedNoEffect) {
  const Variable cache("ANNULUS_TUNING_CACHE", "t.json");
  const OptionFile config("ulysses-degree = 2\ncausal-offset = 3\n");
  const Options options = parse("run --schedule ring --config " + config.path());
  EXPECT_EQ(options.tuning_cache, "t.json");
  EXPECT_EQ(options.ulysses_degree, 2);
  EXPECT_THAT(options.named, ::testing::UnorderedElementsAre("schedule", "config"));
  const OptionFile forms("ranks = 4\ntrace = t.json\nstraggler-percent = 5\ncsv = c.csv\n");
  EXPECT_EQ(parse("plan --config " + forms.path()).ranks, 4);
  const Variable mesh("ANNULUS_MESH", "sp=4");
  EXPECT_TRUE(parse("plan --recommend --ranks 8").recommend);
}

TEST(OptionErrors, SpecsOfTheEnvironmentDoNotCountWhereMeshesAreMade) {
  const Variable mesh("ANNULUS_MESH", "x=4");
  const Variable query("ANNULUS_QUERY_SPEC", "-,x");
  const Variable kv("ANNULUS_KV_SPEC", "-,x");
  for (const std::string given :
       {" --mode prefill", " --sequence-axis ctx", R"( --sharding-rules {"head":{"all":"tp"}})"}) {
    EXPECT_NO_THROW(parse("plan --recommend --ranks 2" + given));
    EXPECT_NO_THROW(parse("plan --scaling" + given));
    EXPECT_NO_THROW(parse("bench --scaling" + given));
    EXPECT_THAT(error_of("plan" + given), HasSubstr("has no effect with"));
  }
}

// Wherever the option comes from: the drawn problems would not be what it asks for.
TEST(OptionErrors, WhatIsDrawnCannotBeGiven) {
  for (const std::string given : {"--dropout 0", "--causal", "--bias b.npy"}) {
    EXPECT_THAT(error_of("verify --random 3 " + given),
                AllOf(StartsWith(given),
                      HasSubstr("drawn at random, so it cannot be given with --random")));
  }
  EXPECT_EQ(parse("verify --random 3 --causal=false").random, 3);
  EXPECT_THAT(error_of("verify --random-case 1:2 --impl ring"),
              AllOf(HasSubstr("--impl ring"), HasSubstr("cannot be given with --random-case")));
  const Variable cap("ANNULUS_SOFT_CAP", "2");
  EXPECT_THAT(error_of("verify --random 3"), HasSubstr("--soft-cap 2: drawn at random"));
}

TEST(OptionErrors, WhatIsDrawnCanHaveItsDefaultInTheEnvironment) {
  struct Setting {
    const char *variable, *defaults, *other;
  };
  for (const Setting& setting :
       {Setting{"ANNULUS_SCHEDULE", "auto", "ring"},
        Setting{"ANNULUS_SEQUENCE_LAYOUT", "auto", "auto,striped"},
        Setting{"ANNULUS_SEQUENCE_AXIS", "sp", "ctx"},
        Setting{"ANNULUS_SHARDING_RULES", "{}", R"({"head": {"all": "tp"}})"},
        Setting{"ANNULUS_DROPOUT", "0.0", "0.1"},
        Setting{"ANNULUS_SOFTMAX_DTYPE", "float32", "float64"},
        Setting{"ANNULUS_NORMALIZE_OUTPUT", "true", "false"},
        Setting{"ANNULUS_BIAS_POLICY", "combine", "bias_wins"}}) {
    const auto with = [&](const char* value) { return Variable(setting.variable, value); };
    {
      const Variable defaults = with(setting.defaults);
      EXPECT_EQ(parse("verify --random 3").random, 3) << setting.variable;
    }
    const Variable other = with(setting.other);
    EXPECT_THAT(error_of("verify --random 3"), HasSubstr("drawn at random")) << setting.variable;
  }
  EXPECT_THAT(error_of("verify --random 3 --schedule auto"),
              HasSubstr("--schedule auto: drawn at random"));
}

TEST(OptionErrors, FilesOfTwoOptionsDiffer) {
  const auto with = [](const std::string& more) { return "run --output o.safetensors " + more; };
  EXPECT_EQ(parse(with("--lse ./o.safetensors")).lse, "./o.safetensors");
  const auto sum_in = [&](const char* file) {
    return with("--normalize-output false --maximum ./o.safetensors --sum ") + file;
  };
  EXPECT_EQ(parse(sum_in("o.safetensors")).maximum, "./o.safetensors");
  EXPECT_EQ(parse(sum_in("s.npy")).sum, "s.npy");
  EXPECT_THAT(error_of(with("--grad-output g.npy --grad-query o.safetensors")),
              AllOf(HasSubstr("--grad-query"), HasSubstr("--output")));
  EXPECT_THAT(error_of(sum_in("s.txt")), AllOf(HasSubstr("--sum"), HasSubstr(".npy")));
  EXPECT_THAT(error_of("run --output o.npy --normalize-output false --maximum m.npy --sum ./m.npy"),
              AllOf(HasSubstr("--sum"), HasSubstr("--maximum")));
  EXPECT_THAT(error_of(with("--query x/../o.safetensors")),
              AllOf(HasSubstr("--output"), HasSubstr("--query")));
  EXPECT_THAT(error_of(with("--trace j --json ./j")),
              AllOf(HasSubstr("--trace"), HasSubstr("--json")));
  EXPECT_THAT(error_of(with("--csv k.npy --key ./k.npy")),
              StartsWith("--csv k.npy: is the same file as --key ./k.npy"));
  EXPECT_THAT(error_of("plan --json m.json --cost-model m.json"),
              StartsWith("--json m.json: is the same file as --cost-model m.json"));
  const Variable caches("XDG_CACHE_HOME", "/c");
  EXPECT_THAT(error_of(with("--tuning measure --json " + ring::default_tuning_file())),
              HasSubstr("is the same file as --tuning-cache /c/annulus/tuning-"));
  EXPECT_THAT(error_of("run --output o.txt"),
              AllOf(HasSubstr("--output"), HasSubstr(".npy"), HasSubstr(".safetensors")));
  EXPECT_THAT(error_of("run --input q.npy"), HasSubstr("is not a .safetensors file"));
}

TEST(OptionErrors, LinksToAFileAreTheSameFile) {
  const OptionFile file("");
  const std::string link = file.path() + ".link";
  const std::string folder = link.substr(0, link.rfind('/') + 1);
  for (const bool hard : {false, true}) {
    if (hard) {
      std::filesystem::create_hard_link(file.path(), link);
    } else {
      std::filesystem::create_symlink(file.path(), link);
    }
    EXPECT_THAT(error_of("run --key " + file.path() + " --json " + link),
                StartsWith("--json " + link + ": is the same file as --key "));
    std::filesystem::remove(link);
  }
  std::filesystem::create_symlink("missing.npy", link);
  EXPECT_THAT(error_of("run --csv " + link + " --json " + folder + "missing.npy"),
              HasSubstr("is the same file as --json"));
  std::filesystem::remove(link);
}

TEST(OptionErrors, RunSaysWhichFilesItLacks) {
  const auto error = [](const std::string& line) {
    return test::message_of<UserError>([&] { check_files_are_given(parse(line)); });
  };
  EXPECT_THAT(error("run"), HasSubstr("annulus run lacks --query, --key, --value, --output (a"));
  EXPECT_THAT(error("run --input a.safetensors"), HasSubstr("lacks --output;"));
  const std::string operands = "run --query q.npy --key k.npy --value v.npy";
  EXPECT_THAT(error(operands), HasSubstr("lacks --output; see annulus run --help"));
  EXPECT_THAT(error(operands + " --output o.npy --grad-output g.npy"),
              HasSubstr("lacks --grad-query, --grad-key, --grad-value"));
  EXPECT_THAT(error(operands + " --grad-output g.npy --forward-output f.npy"),
              HasSubstr("lacks --forward-lse"));
}

TEST(OptionErrors, OnlyReportsCanBeStandardOutput) {
  for (const char* const option : {"--json", "--csv"}) {
    EXPECT_NO_THROW(parse(fmt::format("bench {} -", option)));
  }
  for (const char* const option : {"--trace", "--calibrate"}) {
    EXPECT_THAT(error_of(fmt::format("bench {} -", option)),
                AllOf(StartsWith(std::string(option) + ": got '-', expected a file"),
                      HasSubstr("only --json and --csv")));
    EXPECT_NO_THROW(parse(fmt::format("bench {} ./-", option)));
  }
}

TEST(OptionErrors, OptionsThatExcludeEachOther) {
  EXPECT_THAT(error_of("run --json - --csv -"), HasSubstr("--csv"));
  EXPECT_THAT(error_of("run --input x.safetensors --key k.npy"), HasSubstr("--input"));
  EXPECT_THAT(error_of("verify --random 3 --random-case 1:1"), HasSubstr("--random-case"));
  EXPECT_THAT(error_of("bench --hops --calibrate m.json"), HasSubstr("--hops: --calibrate"));
}

}  // namespace
}  // namespace annulus::launcher
