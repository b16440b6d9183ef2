#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/launcher/commands/command_run.hpp"

namespace annulus::launcher {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;

Outcome bench(const std::string& line) {
  const Outcome outcome = run_on_cpus("bench", bench_command, line);
  EXPECT_EQ(outcome.code, ExitCode::success);
  return outcome;
}

// Options of a case in which every rank but the first sees other ranks' keys.
const std::string kCase = "--shape 1,96,96,4,2,16 --causal --threads 1 ";
const std::string kRing = kCase + "--schedule ring --json - ";

TEST(Bench, MeasuresOneShape) {
  const Outcome outcome = bench(kRing + "--sequence-layout contiguous --iters 3");
  if (!leader()) {
    EXPECT_EQ(outcome.out, "");
    return;
  }
  const nlohmann::json report = outcome.json();
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
  const std::string words = kRing + "--iters 3 --sequence-layout contiguous";
  const nlohmann::json forward = bench(words).row();
  const nlohmann::json row = bench(words + " --backward --deterministic").row();
  if (!leader()) return;
  EXPECT_FALSE(forward.contains("backward"));
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
  const nlohmann::json row = bench(kRing + "--backward --once").row();
  const nlohmann::json other = bench(kRing + "--backward --iters 2").row();
  if (!leader()) return;
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
  const std::string words = kCase + "--iters 2 --backward";
  const std::string open = bench(words).out;
  const std::string fixed = bench(words + " --reproducible world").out;
  if (!leader()) return;
  EXPECT_THAT(open, Not(HasSubstr("reproducible world, ")));
  for (const std::string pass : {"forward", "backward"}) {
    EXPECT_THAT(fixed, ContainsRegex("# reproducible world, 1,96,96,4,2,16,16, " + pass +
                                     ": .* predicted .*; measured .* ms, and .* ms without it"));
  }
}

TEST(Bench, WarmsUpForSomeTime) {
  const auto begin = std::chrono::steady_clock::now();
  bench("--shape 1,16,16,2,1,8 --iters 1 --warmup 0 --warm-seconds 0.1");
  // The calls, and the kernels alone before and after them.
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
}

TEST(Bench, SweepsLengths) {
  const nlohmann::json report =
      bench("--sweep 16:64 --shape 1,1,1,2,1,8 --iters 1 --warmup 0 --json -").json();
  if (!leader()) return;
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
  for (const std::string shape :
       {"1,0,8,1,1,8,8", "1,8,0,1,1,8,8", "2,7,5,2,2,13,3", "1,1,31,4,1,8,8"}) {
    const nlohmann::json report =
        bench("--iters 1 --schedule allgather --json - --shape " + shape).json();
    if (!leader()) continue;
    ASSERT_EQ(report["rows"].size(), 1U);
    EXPECT_EQ(report["rows"][0]["shape"], shape);
    EXPECT_EQ(report["rows"][0]["verdict"], "OK");
    EXPECT_EQ(report["verdict"]["text"], "OK (1 of 1 within bounds)");
  }
}

TEST(Bench, RefusesWhatItCannotRun) {
  EXPECT_THROW(bench(""), UserError);
  EXPECT_THROW(bench("--shape 1,8,8,1,1,8 --impl sdpa"), UserError);
  if (ranks() > 1) {
    EXPECT_THROW(bench("--shape 1,8,8,1,1,8 --schedule local"), UserError);
  }
}

TEST(Bench, ACalibrationOfAShapeThatIsTooLargeLeavesNoFile) {
  const std::string model = ::testing::TempDir() + "annulus_model_of_no_shape.json";
  EXPECT_THROW(bench("--shape 1M,1,1,1M,1M,1k --calibrate " + model), UserError);
  EXPECT_FALSE(std::filesystem::exists(model));
}

}  // namespace
}  // namespace annulus::launcher
