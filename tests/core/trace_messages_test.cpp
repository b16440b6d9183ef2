#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/trace_messages.hpp>

namespace annulus {
namespace {

TraceSpan transfer(int step, std::vector<TraceMessage> messages, std::int64_t begin,
                   std::int64_t end) {
  return {{TraceCategory::transfer, "key/value", step, std::move(messages)},
          "communication",
          begin,
          end};
}

TraceMessage to(int peer) {
  return {peer, 64, false};
}
TraceMessage from(int peer) {
  return {peer, 64, true};
}

// (begin, end, waited) of every span, by rank.
using Times = std::vector<std::vector<std::array<std::int64_t, 3>>>;

Times times_when_moving(TraceOfRanks ranks) {
  begin_when_moving(ranks);
  Times times;
  for (const std::vector<TraceSpan>& spans : ranks) {
    auto& of_rank = times.emplace_back();
    for (const TraceSpan& span : spans) {
      of_rank.push_back({span.begin_ns, span.end_ns, span.waited_ns});
    }
  }
  return times;
}

TEST(TraceFlows, MatchSidesByStepNameAndOrder) {
  // Rank 0 sends twice to rank 1 in step 2 (two calls), rank 1 once to rank 0, in step 3.
  TraceOfRanks ranks(2);
  ranks[0] = {transfer(2, {to(1)}, 50, 60), transfer(2, {to(1)}, 10, 20),
              transfer(3, {from(1)}, 20, 30)};
  ranks[1] = {transfer(2, {from(0)}, 11, 21), transfer(2, {from(0)}, 51, 61),
              transfer(3, {to(0)}, 20, 30)};
  const std::vector<TraceFlow> flows = flows_of(ranks);
  ASSERT_EQ(flows.size(), 3U);
  EXPECT_EQ(flows[0].sender.span, 1U);  // the earlier one, though it was recorded later
  EXPECT_EQ(flows[0].receiver.span, 0U);
  EXPECT_EQ(flows[0].index, 0U);
  EXPECT_EQ(flows[1].sender.span, 0U);
  EXPECT_EQ(flows[1].receiver.span, 1U);
  EXPECT_EQ(flows[1].index, 1U);
  EXPECT_EQ(flows[2].sender.rank, 1U);
  EXPECT_EQ(flows[2].receiver.rank, 0U);
}

TEST(TraceFlows, NeedBothSides) {
  TraceOfRanks ranks(2);
  ranks[0] = {transfer(0, {to(1)}, 0, 9), transfer(1, {from(1)}, 0, 9)};
  ranks[1] = {transfer(1, {from(0)}, 0, 9)};  // another step, and no send in step 1
  EXPECT_TRUE(flows_of(ranks).empty());
}

TEST(TraceTransfers, BeginOnceBothSidesHavePosted) {
  EXPECT_EQ(
      times_when_moving({{transfer(0, {to(1)}, 100, 400)}, {transfer(0, {from(0)}, 250, 410)}}),
      (Times{{{250, 400, 150}}, {{250, 410, 0}}}));  // the receiver was late
}

TEST(TraceTransfers, ABufferedSendStaysWhereItWas) {
  EXPECT_EQ(
      times_when_moving({{transfer(0, {to(1)}, 100, 110)}, {transfer(0, {from(0)}, 250, 260)}}),
      (Times{{{100, 110, 0}}, {{250, 260, 0}}}));
}

// As GPUs note them: all messages of a step in one span.
TEST(TraceTransfers, ASpanOfSeveralMessagesBeginsWithTheFirstThatItReceives) {
  EXPECT_EQ(times_when_moving({{transfer(0, {from(1), from(2), to(1)}, 10, 100)},
                               {transfer(0, {to(0), from(0)}, 40, 100)},
                               {transfer(0, {to(0)}, 30, 100)}}),
            (Times{{{30, 100, 20}}, {{40, 100, 0}}, {{30, 100, 0}}}));
}

TEST(TraceTransfers, StayAsPostedWhereASideIsUnknown) {
  EXPECT_EQ(times_when_moving(
                {{transfer(0, {from(1), from(1)}, 10, 100)}, {transfer(0, {to(0)}, 40, 100)}}),
            (Times{{{10, 100, 0}}, {{40, 100, 0}}}));
}

TEST(TraceSpans, TravelAsBytes) {
  std::vector<TraceSpan> spans{transfer(3, {to(1), from(7)}, -5, 1'000'000'000'000'000'123),
                               {{TraceCategory::kernel, "native \"µ\"", 4}, "compute", 1, 2, 3}};
  const std::vector<TraceSpan> back = unpack_spans(pack_spans(spans));
  ASSERT_EQ(back.size(), spans.size());
  for (std::size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(back[i].label.category, spans[i].label.category);
    EXPECT_EQ(back[i].label.name, spans[i].label.name);
    EXPECT_EQ(back[i].label.step, spans[i].label.step);
    EXPECT_EQ(back[i].label.messages, spans[i].label.messages);
    EXPECT_EQ(back[i].stream, spans[i].stream);
    EXPECT_EQ(back[i].begin_ns, spans[i].begin_ns);
    EXPECT_EQ(back[i].end_ns, spans[i].end_ns);
    EXPECT_EQ(back[i].waited_ns, spans[i].waited_ns);
  }
  EXPECT_TRUE(unpack_spans(pack_spans({})).empty());
  EXPECT_THROW((void)unpack_spans("no spans"), InternalError);
}

}  // namespace
}  // namespace annulus
