#include <chrono>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "launcher/commands/commands.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::launcher {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string bench(std::vector<std::string> words) {
  words.insert(words.begin(), {"bench", "--device", "cpu"});
  std::string help;
  const auto options = parse_options(words, help);
  std::ostringstream out;
  EXPECT_EQ(bench_command({test::session(), options.value(), out}), ExitCode::success);
  return out.str();
}

int ranks() {
  return test::session().size();
}
bool leader() {
  return test::session().rank() == 0;
}

TEST(Bench, MeasuresOneShape) {
  const std::string out =
      bench({"--shape", "1,96,96,4,2,16", "--causal", "--schedule", "ring", "--sequence-layout",
             "contiguous", "--iters", "3", "--threads", "1", "--json", "-"});
  if (!leader()) {
    EXPECT_EQ(out, "");
    return;
  }
  const nlohmann::json report = nlohmann::json::parse(out);
  EXPECT_EQ(report["schema"], "annulus.bench");
  ASSERT_EQ(report["rows"].size(), 1U);
  const nlohmann::json& row = report["rows"][0];
  EXPECT_EQ(row["shape"], "1,96,96,4,2,16,16");
  EXPECT_EQ(row["schedule"], "ring");
  EXPECT_EQ(row["impl"], "native");
  const double time = row["time"];
  EXPECT_GT(time, 0);
  EXPECT_LE(row["least"], time);
  EXPECT_GE(row["p99"], time);
  // 2 · N · (D + Dv) operations for each of the 96 · 97 / 2 visible pairs; times have three digits.
  const double flops = 2 * 4 * 32 * (96 * 97 / 2);
  EXPECT_NEAR(row["rate"].get<double>() * time * 1e6 * ranks(), flops,
              flops * (0.0005 / time + 0.005 / row["rate"].get<double>()));
  // The last rank sees all other chunks: K and V of 2 heads of 16 floats for each token.
  const double moved = 96.0 * (ranks() - 1) / ranks() * 2 * 2 * 16 * 4 / (1 << 20);
  EXPECT_NEAR(row["moved"], moved, 0.0005);
  EXPECT_EQ(row["hidden"].is_null(), ranks() == 1);
  EXPECT_GT(row["local"], 0);
  EXPECT_GT(row["memory"], 0);
  EXPECT_LT(row["error"], 1e-6);
  EXPECT_GT(row["error"], 1e-9);
  EXPECT_EQ(row["verdict"], "OK");
}

TEST(Bench, MeasuresTheBackwardPass) {
  const std::vector<std::string> words{
      "--shape",   "1,96,96,4,2,16", "--causal", "--schedule", "ring", "--iters",
      "3",         "--threads",      "1",        "--json",     "-",    "--sequence-layout",
      "contiguous"};
  const std::string forward = bench(words);
  std::vector<std::string> more = words;
  more.insert(more.end(), {"--backward", "--deterministic"});
  const std::string out = bench(more);
  if (!leader()) return;
  EXPECT_FALSE(nlohmann::json::parse(forward)["rows"][0].contains("backward"));
  const nlohmann::json row = nlohmann::json::parse(out)["rows"][0];
  EXPECT_EQ(row["backward impl"], "native");
  EXPECT_EQ(row["backward schedule"], "ring");
  const double time = row["backward"];
  EXPECT_GT(time, 0);
  EXPECT_GT(row["both"], 0);
  // 2 · N · (3 D + 2 Dv) operations for each of the 96 · 97 / 2 visible pairs.
  const double flops = 2 * 4 * 80 * (96 * 97 / 2);
  EXPECT_NEAR(row["backward rate"].get<double>() * time * 1e6 * ranks(), flops,
              flops * (0.0005 / time + 0.005 / row["backward rate"].get<double>()));
  // Rates have two digits after the point.
  const double local = row["backward local"];
  ASSERT_GT(local, 0);
  const double share = row["backward rate"].get<double>() / local;
  EXPECT_NEAR(row["backward of local"].get<double>() / 100, share,
              0.001 + 0.005 / local * (1 + share));
  EXPECT_EQ(row["backward hidden"].is_null(), ranks() == 1);
  EXPECT_EQ(row["backward moved"] > 0, ranks() > 1);
  EXPECT_GE(row["backward memory"], row["memory"].get<double>());
  EXPECT_EQ(row["verdict"], "OK");
}

// One call has the memory and bytes of many calls. The report leaves out what one call does not
// tell.
TEST(Bench, MeasuresOneCall) {
  const std::vector<std::string> words{"--shape", "1,96,96,4,2,16", "--causal", "--schedule",
                                       "ring",    "--threads",      "1",        "--json",
                                       "-",       "--backward"};
  std::vector<std::string> once = words, many = words;
  once.emplace_back("--once");
  many.insert(many.end(), {"--iters", "2"});
  const std::string of_one = bench(once);
  const std::string of_many = bench(many);
  if (!leader()) return;
  const nlohmann::json row = nlohmann::json::parse(of_one)["rows"][0];
  const nlohmann::json other = nlohmann::json::parse(of_many)["rows"][0];
  for (const std::string pass : {"", "backward "}) {
    for (const std::string same : {"moved", "memory", "extra"}) {
      EXPECT_EQ(row[pass + same], other[pass + same]) << pass << same;
    }
    EXPECT_GT(row[pass + "rate"], 0);
    EXPECT_EQ(row[pass + "hidden"].is_null(), ranks() == 1);
    for (const std::string left_out : {"local", "of local"}) {
      EXPECT_TRUE(row[pass + left_out].is_null()) << pass << left_out;
      EXPECT_FALSE(other[pass + left_out].is_null()) << pass << left_out;
    }
  }
  EXPECT_TRUE(row["both"].is_null());
  EXPECT_LT(row["error"], 1e-6);
}

TEST(Bench, MeasuresWhatTheSameBitsOnAnyRanksCost) {
  const std::vector<std::string> words{"--shape", "1,96,96,4,2,16", "--causal", "--iters",
                                       "2",       "--threads",      "1",        "--backward"};
  std::vector<std::string> more = words;
  more.insert(more.end(), {"--reproducible", "world"});
  const std::string open = bench(words);
  const std::string fixed = bench(more);
  if (!leader()) return;
  EXPECT_THAT(open, Not(HasSubstr("reproducible world, ")));
  for (const std::string pass : {"forward", "backward"}) {
    EXPECT_THAT(fixed, ContainsRegex("# reproducible world, 1,96,96,4,2,16,16, " + pass +
                                     ": .* predicted .*; measured .* ms, and .* ms without it"));
  }
}

TEST(Bench, WarmsUpForSomeTime) {
  const auto begin = std::chrono::steady_clock::now();
  bench({"--shape", "1,16,16,2,1,8", "--iters", "1", "--warmup", "0", "--warm-seconds", "0.1"});
  // The calls, and the kernels alone before and after them.
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
}

TEST(Bench, SweepsLengths) {
  const std::string out = bench({"--sweep", "16:64", "--shape", "1,1,1,2,1,8", "--iters", "1",
                                 "--warmup", "0", "--json", "-"});
  if (!leader()) return;
  const nlohmann::json report = nlohmann::json::parse(out);
  std::vector<std::string> shapes;
  for (const nlohmann::json& row : report["rows"]) {
    shapes.push_back(row["shape"]);
    EXPECT_EQ(row["impl"], "native");
    EXPECT_EQ(row["verdict"], "OK");
  }
  EXPECT_THAT(shapes, ElementsAre("1,16,16,2,1,8,8", "1,32,32,2,1,8,8", "1,64,64,2,1,8,8"));
  EXPECT_EQ(report["verdict"]["text"], "OK (3 of 3 within bounds)");
}

TEST(Bench, EmptyAndUnevenShapesWork) {
  for (const char* shape : {"1,0,8,1,1,8,8", "1,8,0,1,1,8,8", "2,7,5,2,2,13,3", "1,1,31,4,1,8,8"}) {
    const std::string out =
        bench({"--shape", shape, "--iters", "1", "--schedule", "allgather", "--json", "-"});
    if (!leader()) continue;
    const nlohmann::json report = nlohmann::json::parse(out);
    ASSERT_EQ(report["rows"].size(), 1U);
    EXPECT_EQ(report["rows"][0]["shape"], shape);
    EXPECT_EQ(report["rows"][0]["verdict"], "OK");
    EXPECT_EQ(report["verdict"]["text"], "OK (1 of 1 within bounds)");
  }
}

TEST(Bench, RefusesWhatItCannotRun) {
  EXPECT_THROW(bench({}), UserError);
  EXPECT_THROW(bench({"--shape", "1,8,8,1,1,8", "--impl", "sdpa"}), UserError);
  if (ranks() > 1) {
    EXPECT_THROW(bench({"--shape", "1,8,8,1,1,8", "--schedule", "local"}), UserError);
  }
}

TEST(Bench, ACalibrationOfAShapeThatIsTooLargeLeavesNoFile) {
  const std::string model = ::testing::TempDir() + "annulus_model_of_no_shape.json";
  EXPECT_THROW(bench({"--calibrate", model, "--shape", "1M,1,1,1M,1M,1k"}), UserError);
  EXPECT_FALSE(std::filesystem::exists(model));
}

}  // namespace
}  // namespace annulus::launcher
