#include "launcher/pictures/timeline.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// `count` kernels and waits in turn, each a microsecond long, with messages all the time.
std::vector<TraceSpan> spans(int count) {
  std::vector<TraceSpan> result;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool kernel = i % 2 == 0;
    result.push_back({{kernel ? TraceCategory::kernel : TraceCategory::wait, "test"},
                      "compute",
                      i * 1000,
                      (i + 1) * 1000});
  }
  result.push_back({{TraceCategory::transfer, "key"}, "communication", 0, count * 1000});
  return result;
}

std::size_t count_of(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST(Timeline, ShowsEverySpanOfFewRanks) {
  const std::vector<TraceSpan> of_rank = spans(4);
  const std::string text = timeline_picture(
      {{0, &of_rank}, {1, &of_rank}, {2, &of_rank}, {3, &of_rank}}, "ring", "note");
  // 4 µs are 1000 pixels; the left margin is 70.
  EXPECT_THAT(text, HasSubstr("<path class=\"kernel\" d=\"M70 58h250"));
  EXPECT_THAT(text, HasSubstr("M570 58h250"));
  EXPECT_THAT(text, HasSubstr("<path class=\"wait\" d=\"M320 58h250"));
  EXPECT_THAT(text, HasSubstr("<path class=\"transfer\" d=\"M70 "));
  for (const char* label : {">0<", ">1<", ">2<", ">3<", "time (µs)", ">ring<", ">note<"}) {
    EXPECT_THAT(text, HasSubstr(label));
  }
  EXPECT_EQ(count_of(text, "h250"), 16U);
}

TEST(Timeline, ManyRanksStayLegible) {
  const std::vector<TraceSpan> of_rank = spans(20);
  std::vector<TimelineRow> rows;
  for (int rank = 0; rank < 256; ++rank) rows.push_back({rank, &of_rank});
  const std::string text = timeline_picture(rows, "ring", "note");
  // Rows of 3 pixels, so every fourth is labelled.
  EXPECT_THAT(text, HasSubstr("height=\"888\""));
  EXPECT_THAT(text, HasSubstr(">4</text>"));
  EXPECT_THAT(text, Not(HasSubstr(">6</text>")));
  EXPECT_EQ(count_of(text, "h50"), 256U * 20);
}

TEST(Timeline, PixelsShowWhatMostOfTheirTimeWasSpentOn) {
  std::vector<TraceSpan> of_rank;
  // 3 of 4 parts kernels, the rest waiting: too many to be drawn on their own.
  for (std::int64_t i = 0; i < 40000; ++i) {
    const auto category = i % 4 == 3 ? TraceCategory::wait : TraceCategory::kernel;
    // The last half waits.
    of_rank.push_back({{i < 20000 ? category : TraceCategory::wait, "test"}, "compute", i, i + 1});
  }
  const std::string text = timeline_picture({{0, &of_rank}}, "ring", "note");
  EXPECT_THAT(text, HasSubstr("<path class=\"kernel\" d=\"M70 58h500v"));
  EXPECT_THAT(text, HasSubstr("<path class=\"wait\" d=\"M570 58h500v"));
  EXPECT_LT(text.size(), 4000U);
}

TEST(Timeline, NothingHappensInNoTime) {
  const std::vector<TraceSpan> none;
  EXPECT_THAT(timeline_picture({{0, &none}}, "local", ""), HasSubstr("</svg>"));
}

TEST(Timeline, RanksAreSpreadEvenly) {
  EXPECT_EQ(spread_ranks(3, 8), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(spread_ranks(100, 4), (std::vector<int>{0, 33, 66, 99}));
  EXPECT_EQ(spread_ranks(5, 1), (std::vector<int>{0}));
  EXPECT_TRUE(spread_ranks(0, 4).empty());
  const std::vector<int> many = spread_ranks(4096, kMaximumPicturedRanks);
  EXPECT_EQ(many.size(), 256U);
  EXPECT_EQ(many.back(), 4095);
  EXPECT_EQ(std::adjacent_find(many.begin(), many.end()), many.end());
}

}  // namespace
}  // namespace annulus::launcher
