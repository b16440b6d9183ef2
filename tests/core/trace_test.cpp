#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/trace.hpp>

namespace annulus {
namespace {

TraceSpan span(TraceCategory category, std::int64_t begin, std::int64_t end,
               const std::string& stream = "compute") {
  return {{category, std::string(name_of(category))}, stream, begin, end};
}

TEST(TraceSummary, UnitesAndOverlaps) {
  using enum TraceCategory;
  const TraceSummary summary = summarize({
      span(call, 0, 100),
      span(kernel, 10, 30),
      span(kernel, 20, 40),  // overlaps the one before: 10..40 counts once
      span(kernel, 60, 80),
      span(transfer, 0, 15, "communication"),
      span(transfer, 35, 70, "communication"),
      span(wait, 40, 60),
      span(merge, 80, 85),
      span(plan, 90, 95),
  });
  EXPECT_EQ(summary.call, 100);
  EXPECT_EQ(summary.kernel, 50);
  EXPECT_EQ(summary.merge, 5);
  EXPECT_EQ(summary.wait, 20);
  EXPECT_EQ(summary.transfer, 50);
  EXPECT_EQ(summary.transfer_under_kernel, 5 + 5 + 10);
  EXPECT_EQ(summary.bookkeeping(), 30);
}

TEST(TraceSummary, EmptyIsZero) {
  const TraceSummary summary = summarize({});
  EXPECT_EQ(summary.call, 0);
  EXPECT_EQ(summary.bookkeeping(), 0);
}

TEST(TraceSummary, AgainstCountingTicks) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<TraceSpan> spans;
    std::vector<bool> kernel(100);
    std::vector<bool> transfer(100);
    for (unsigned i = random() % 12; i > 0; --i) {
      const bool is_kernel = random() % 2 == 0;
      const auto begin = static_cast<std::int64_t>(random() % 90);
      const auto end = begin + static_cast<std::int64_t>(random() % 10);
      spans.push_back(
          span(is_kernel ? TraceCategory::kernel : TraceCategory::transfer, begin, end));
      for (auto t = begin; t < end; ++t) {
        (is_kernel ? kernel : transfer)[static_cast<std::size_t>(t)] = true;
      }
    }
    std::int64_t kernels = 0;
    std::int64_t transfers = 0;
    std::int64_t both = 0;
    for (std::size_t t = 0; t < 100; ++t) {
      kernels += kernel[t] ? 1 : 0;
      transfers += transfer[t] ? 1 : 0;
      both += kernel[t] && transfer[t] ? 1 : 0;
    }
    const TraceSummary summary = summarize(spans);
    ASSERT_EQ(summary.kernel, kernels);
    ASSERT_EQ(summary.transfer, transfers);
    ASSERT_EQ(summary.transfer_under_kernel, both);
  }
}

TEST(TraceScope, RecordsItsLifetime) {
  TraceCollector collector;
  Tracer tracer;
  { const TraceScope unheard(&tracer, "compute", {}); }
  tracer.add_sink(collector);
  EXPECT_TRUE(tracer.enabled());
  const std::int64_t before = monotonic_ns();
  { const TraceScope scope(&tracer, "compute", {TraceCategory::merge, "merge", 1}); }
  const std::int64_t after = monotonic_ns();
  { const TraceScope nobody(nullptr, "compute", {}); }
  ASSERT_EQ(collector.spans().size(), 1U);
  const TraceSpan& recorded = collector.spans().front();
  EXPECT_LE(before, recorded.begin_ns);
  EXPECT_LE(recorded.begin_ns, recorded.end_ns);
  EXPECT_LE(recorded.end_ns, after);
  EXPECT_EQ(recorded.stream, "compute");
  EXPECT_EQ(recorded.label.name, "merge");
  collector.clear();
  EXPECT_TRUE(collector.spans().empty());
}

}  // namespace
}  // namespace annulus
