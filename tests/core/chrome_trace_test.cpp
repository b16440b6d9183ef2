#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/chrome_trace.hpp>

namespace annulus {
namespace {

using nlohmann::json;

TraceSpan kernel(std::int64_t begin, std::int64_t end, const std::string& stream = "compute") {
  return {{TraceCategory::kernel, "native", 0}, stream, begin, end};
}

TraceSpan transfer(TraceMessage message, std::int64_t begin, std::int64_t end) {
  return {
      {TraceCategory::transfer, "key/value \"quoted\"", 2, {message}}, "communication", begin, end};
}

std::vector<json> events(const TraceOfRanks& ranks, const std::string& phase) {
  std::vector<json> result;
  const json document = json::parse(chrome_trace(ranks, {}));
  for (const json& event : document.at("traceEvents")) {
    if (event.at("ph") == phase) result.push_back(event);
  }
  return result;
}

// By (process, thread).
std::map<std::pair<int, int>, std::string> row_names(const TraceOfRanks& ranks) {
  std::map<std::pair<int, int>, std::string> names;
  for (const json& event : events(ranks, "M")) {
    if (event.at("name") != "thread_name") continue;
    names[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
  }
  return names;
}

TEST(ChromeTrace, SpansOfTwoRanks) {
  const TraceOfRanks ranks{{kernel(5'000, 7'500), transfer({1, 4096, true}, 5'500, 9'000)},
                           {kernel(6'000, 6'000), transfer({0, 4096, false}, 5'500, 8'000)}};
  const std::vector<json> spans = events(ranks, "X");
  ASSERT_EQ(spans.size(), 4U);
  EXPECT_EQ(spans[0].at("pid"), 0);
  EXPECT_EQ(spans[0].at("cat"), "kernel");
  EXPECT_DOUBLE_EQ(spans[0].at("ts"), 0.0);
  EXPECT_DOUBLE_EQ(spans[0].at("dur"), 2.5);
  EXPECT_EQ(spans[0].at("args"), (json{{"step", 0}}));
  EXPECT_EQ(spans[1].at("cat"), "transfer");
  EXPECT_EQ(spans[1].at("name"), "key/value \"quoted\"");
  EXPECT_DOUBLE_EQ(spans[1].at("ts"), 0.5);
  EXPECT_EQ(spans[1].at("args"),
            json::parse(R"({"step": 2, "from": [{"rank": 1, "bytes": 4096}]})"));
  EXPECT_EQ(spans[3].at("args"), json::parse(R"({"step": 2, "to": [{"rank": 0, "bytes": 4096}]})"));
  const auto names = row_names(ranks);
  const std::set<std::string> of_first{names.at({0, 0}), names.at({0, 1})};
  EXPECT_EQ(of_first, (std::set<std::string>{"communication, receives", "compute"}));
  EXPECT_EQ(names.at({1, spans[3].at("tid")}), "communication, sends");
}

TEST(ChromeTrace, WaitingBeforeATransferIsNamed) {
  TraceSpan late = transfer({1, 1, true}, 5'000, 9'000);
  late.waited_ns = 1'500;
  const json args = events({{late}}, "X").at(0).at("args");
  EXPECT_DOUBLE_EQ(args.at("waited_us"), 1.5);
}

TEST(ChromeTrace, ArrowsLeadFromSenderToReceiver) {
  const TraceOfRanks ranks{{kernel(0, 1'000), transfer({1, 64, false}, 2'000, 4'000)},
                           {kernel(0, 1'000), transfer({0, 64, true}, 3'000, 5'000)}};
  const std::vector<json> spans = events(ranks, "X");
  const std::vector<json> starts = events(ranks, "s");
  const std::vector<json> finishes = events(ranks, "f");
  ASSERT_EQ(starts.size(), 1U);
  ASSERT_EQ(finishes.size(), 1U);
  EXPECT_TRUE(starts[0].at("id").is_number_integer());
  EXPECT_EQ(starts[0].at("id"), finishes[0].at("id"));
  EXPECT_EQ(starts[0].at("name"), finishes[0].at("name"));
  EXPECT_EQ(starts[0].at("cat"), finishes[0].at("cat"));
  EXPECT_EQ(finishes[0].at("bp"), "e");
  EXPECT_EQ(starts[0].at("args"), (json{{"step", 2}, {"from", 0}, {"to", 1}, {"index", 0}}));
  // Each end lies inside the span that it belongs to.
  const auto expect_inside = [](const json& end, const json& span) {
    EXPECT_EQ(end.at("pid"), span.at("pid"));
    EXPECT_EQ(end.at("tid"), span.at("tid"));
    EXPECT_GE(end.at("ts").get<double>(), span.at("ts").get<double>());
    EXPECT_LT(end.at("ts").get<double>(),
              span.at("ts").get<double>() + span.at("dur").get<double>());
  };
  expect_inside(starts[0], spans[1]);
  expect_inside(finishes[0], spans[3]);
}

TEST(ChromeTrace, NoArrowPointsBackInTime) {
  const TraceOfRanks ranks{{transfer({1, 64, false}, 9'000, 9'500)},
                           {transfer({0, 64, true}, 3'000, 5'000)}};
  EXPECT_TRUE(events(ranks, "s").empty());
  EXPECT_TRUE(events(ranks, "f").empty());
}

TEST(ChromeTrace, OverlappingSpansGetRowsOfTheirOwn) {
  const TraceOfRanks ranks{{kernel(0, 100), kernel(10, 50), kernel(20, 40), kernel(60, 70),
                            kernel(30, 55), kernel(90, 120), kernel(100, 130)}};
  const std::vector<json> spans = events(ranks, "X");
  std::vector<int> rows;
  for (const json& span : spans) rows.push_back(span.at("tid"));
  // (30,55) crosses (10,50), and (90,120) crosses (0,100); the rest is nested or apart.
  EXPECT_EQ(rows, (std::vector<int>{0, 0, 0, 0, 1, 1, 0}));
  EXPECT_EQ(row_names(ranks), (std::map<std::pair<int, int>, std::string>{{{0, 0}, "compute"},
                                                                          {{0, 1}, "compute 2"}}));
}

TEST(ChromeTrace, SaysWhatItIsAbout) {
  const std::string text =
      chrome_trace({{kernel(0, 1)}}, {{"mask", "causal"}, {"options", "--output=\xff.npy"}});
  const json about = json::parse(text).at("otherData");
  EXPECT_EQ(about.at("mask"), "causal");
  EXPECT_TRUE(about.contains("options"));
}

TEST(ChromeTrace, WithoutSpansIsStillATrace) {
  EXPECT_TRUE(json::parse(chrome_trace({{}, {}}, {})).at("traceEvents").empty());
}

}  // namespace
}  // namespace annulus
