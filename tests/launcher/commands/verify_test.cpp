#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/launcher/commands/command_run.hpp"

namespace annulus::launcher {
namespace {

Outcome verify(const std::string& line) {
  return run_on_cpus("verify", verify_command, line);
}

TEST(Verify, RandomProblemsPass) {
  const Outcome outcome = verify("--random 25 --seed 5 --wide");
  EXPECT_EQ(outcome.code, ExitCode::success) << outcome.out;
  if (!leader()) {
    EXPECT_EQ(outcome.out, "");
    return;
  }
  EXPECT_THAT(outcome.out, HasSubstr("# Verdict: OK (25 of 25 within bounds"));
  EXPECT_THAT(outcome.out, HasSubstr("annulus verify --random-case 5:24 --device cpu"));
  EXPECT_THAT(outcome.out,
              ::testing::ContainsRegex("# computed by: native [0-9]+(, [a-z]+ [0-9]+)*\n"));
}

// Drawn for four ranks.
TEST(Verify, SaysWhyASingleProblemIsRefused) {
  if (ranks() != 4) GTEST_SKIP() << "for 4 ranks";
  const Outcome gradients = verify("--random-case 0:0 --backward --reproducible world");
  const Outcome both = verify("--random-case 0:1 --backward --reproducible world");
  const Outcome two = verify("--random 2 --backward --reproducible world");
  if (!leader()) return;
  EXPECT_THAT(gradients.out, HasSubstr("# problem 0 without gradients: "));
  EXPECT_THAT(both.out, HasSubstr("# problem 1 refused: "));
  EXPECT_THAT(two.out, Not(HasSubstr("# problem ")));
}

// Also problems that are drawn for vanilla, in float32.
TEST(Verify, RandomProblemsPassWithAnotherImplementation) {
  const Outcome outcome = verify("--random 25 --seed 5 --impl native");
  EXPECT_EQ(outcome.code, ExitCode::success) << outcome.out;
  if (!leader()) return;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("# computed by: native "), Not(HasSubstr("vanilla"))));
  EXPECT_THAT(outcome.out, HasSubstr("float64 0, a softmax in float64 0"));
}

TEST(Verify, GradientsOfRandomProblemsPass) {
  const auto passes = [](const std::string& text) {
    const auto begin = text.find("# backward passes: ");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  const Outcome all = verify("--random 20 --seed 6 --wide --backward");
  const Outcome some = verify("--random 20 --seed 6 --wide");
  const Outcome none = verify("--random 20 --seed 6 --wide --backward=false");
  for (const Outcome* outcome : {&all, &some, &none}) {
    EXPECT_EQ(outcome->code, ExitCode::success) << outcome->out;
  }
  if (!leader()) return;
  EXPECT_THAT(all.out,
              AllOf(HasSubstr("of a gradient's "),
                    ::testing::ContainsRegex("# gradients computed by: .*native [0-9]+"),
                    ::testing::ContainsRegex("--random-case 6:[0-9]+ --device cpu --backw")));
  EXPECT_THAT(none.out, AllOf(HasSubstr("# gradients computed by: none"),
                              HasSubstr("--random-case 6:7 --device cpu --backward=false")));
  EXPECT_EQ(passes(none.out), "# backward passes: none");
  EXPECT_NE(passes(some.out), passes(none.out));
  EXPECT_NE(passes(some.out), passes(all.out));
}

TEST(Verify, OneProblemRepeatsAsDrawn) {
  const Outcome many = verify("--random 4 --seed 11 --wide");
  const Outcome one = verify("--random-case 11:3 --wide");
  EXPECT_EQ(one.code, ExitCode::success);
  if (!leader()) return;
  // The words of a row: how wide the columns are depends on the first one.
  const auto row = [](const std::string& text) {
    const auto end = text.find("--random-case 11:3");
    EXPECT_NE(end, std::string::npos) << text;
    std::istringstream line(text.substr(text.rfind('\n', end), end - text.rfind('\n', end)));
    return std::vector<std::string>(std::istream_iterator<std::string>(line), {});
  };
  EXPECT_EQ(row(one.out), row(many.out)) << "errors and all";
}

TEST(Verify, TakesAProblemFromOptions) {
  const Outcome outcome = verify(
      "--shape 2,33,47,6,2,16,8 --causal --causal-offset bottom-right --dtype bfloat16 --json -");
  EXPECT_EQ(outcome.code, ExitCode::success);
  if (!leader()) return;
  const nlohmann::json report = outcome.json();
  EXPECT_EQ(report["schema"], "annulus.verify");
  EXPECT_EQ(report["verdict"]["passed"], true);
  ASSERT_EQ(report["rows"].size(), 1U);
  const nlohmann::json& row = report["rows"][0];
  EXPECT_EQ(row["shape"], "2,33,47,6,2,16,8");
  EXPECT_EQ(row["dtype"], "bfloat16");
  EXPECT_EQ(row["mask"], "causal+offset:14");
  EXPECT_GT(row["error"], 1e-4);
  EXPECT_LT(row["error"], 6e-3);
  EXPECT_THAT(row["command"].get<std::string>(), HasSubstr("--shape=2,33,47,6,2,16,8"));
}

TEST(Verify, TakesTheGradientsOfAProblemFromOptions) {
  const std::string words = "--shape 2,33,47,6,3,16,8 --causal --json -";
  const auto row = [](const Outcome& outcome) {
    EXPECT_EQ(outcome.code, ExitCode::success) << outcome.out;
    return outcome.row();
  };
  const nlohmann::json without = row(verify(words));
  const nlohmann::json with = row(verify(words + " --backward"));
  EXPECT_THROW(verify(words + " --backward --normalize-output false"), UserError);
  if (!leader()) return;
  EXPECT_TRUE(without["gradients"].is_null());
  EXPECT_TRUE(without["backward"].is_null());
  EXPECT_GT(with["gradients"], 0);
  EXPECT_LT(with["gradients"], 0.5);
  EXPECT_EQ(with["backward impl"], "native");
  EXPECT_THAT(with["command"].get<std::string>(), HasSubstr("--backward=true"));
}

// Another order of sums.
TEST(Verify, TakesTheUlyssesDegree) {
  if (ranks() != 4) GTEST_SKIP() << "4 ranks have several degrees";
  std::set<double> ratios;
  for (const std::string degree : {"1", "2", "4"}) {
    const nlohmann::json row =
        verify("--shape 1,64,64,4,4,16 --schedule hybrid --json - --ulysses-degree " + degree)
            .row();
    if (leader()) ratios.insert(row["ratio"].get<double>());
  }
  if (leader()) {
    EXPECT_GT(ratios.size(), 1U);
  }
}

TEST(Verify, RandomProblemsHaveTheSameBitsOnAnyRanks) {
  const Outcome outcome = verify("--random 16 --seed 3 --reproducible world");
  EXPECT_EQ(outcome.code, ExitCode::success) << outcome.out;
}

TEST(Verify, ExplainsItsChoices) {
  const Outcome outcome = verify("--shape 1,16,16,2,2,8 --explain");
  if (!leader()) return;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("# implementation chosen: native"),
                                 HasSubstr("# schedule chosen: ")));
}

TEST(Verify, RefusesWhatItCannotHonour) {
  EXPECT_THROW(verify(""), UserError);
  EXPECT_THROW(verify("--random 3 --causal"), UserError);
  EXPECT_THROW(verify("--random 3 --shape 1,8,8,1,1,8"), UserError);
  EXPECT_THROW(verify("--random 1 --json /nowhere/at/all.json"), UserError);
  EXPECT_THROW(verify("--shape 1,8,8,3,2,8"), UserError);
  if (ranks() > 1) {
    EXPECT_THROW(verify("--shape 1,8,8,1,1,8 --schedule local"), UserError);
  }
}

// Draws are legal, so an implementation that refuses them is a failure and not a usage error.
TEST(Verify, ADrawnProblemThatCannotRunFails) {
  const Outcome outcome = verify("--random 2 --impl sdpa");
  EXPECT_EQ(outcome.code, ExitCode::wrong_numbers);
  if (!leader()) return;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("# Verdict: FAILED (0 of 2 within bounds, 2 not computed"),
                    HasSubstr("# problem 1 failed: "), HasSubstr("# problem 1 again: "),
                    HasSubstr("--impl sdpa")));
}

}  // namespace
}  // namespace annulus::launcher
