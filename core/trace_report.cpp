#include <algorithm>
#include <map>
#include <ostream>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ostream.h>
#include <nlohmann/json.hpp>

#include <annulus/core/trace.hpp>

namespace annulus {
namespace {

using Interval = std::pair<std::int64_t, std::int64_t>;

// Sorted, disjoint intervals that cover the same points.
std::vector<Interval> united(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> result;
  for (const Interval& interval : intervals) {
    if (!result.empty() && interval.first <= result.back().second) {
      result.back().second = std::max(result.back().second, interval.second);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

std::int64_t length(const std::vector<Interval>& disjoint) {
  std::int64_t total = 0;
  for (const auto& [begin, end] : disjoint) total += end - begin;
  return total;
}

std::int64_t overlap(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::int64_t total = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    total += std::max<std::int64_t>(
        0, std::min(a[i].second, b[j].second) - std::max(a[i].first, b[j].first));
    (a[i].second < b[j].second ? i : j)++;
  }
  return total;
}

}  // namespace

TraceSummary summarize(const std::vector<TraceSpan>& spans) {
  std::map<TraceCategory, std::vector<Interval>> by_category;
  for (const TraceSpan& span : spans) {
    by_category[span.label.category].emplace_back(span.begin_ns, span.end_ns);
  }
  for (auto& [category, intervals] : by_category) intervals = united(std::move(intervals));
  const auto& transfers = by_category[TraceCategory::transfer];
  const auto& kernels = by_category[TraceCategory::kernel];
  TraceSummary summary;
  summary.call = length(by_category[TraceCategory::call]);
  summary.kernel = length(kernels);
  summary.merge = length(by_category[TraceCategory::merge]);
  summary.wait = length(by_category[TraceCategory::wait]);
  summary.transfer = length(transfers);
  summary.transfer_under_kernel = overlap(transfers, kernels);
  return summary;
}

void write_text_summary(std::ostream& out, const std::vector<TraceSpan>& spans) {
  struct Total {
    std::int64_t count = 0;
    std::int64_t ns = 0;
  };
  std::map<std::tuple<TraceCategory, std::string, std::string>, Total> totals;
  for (const TraceSpan& span : spans) {
    Total& total = totals[{span.label.category, span.label.name, span.stream}];
    ++total.count;
    total.ns += span.end_ns - span.begin_ns;
  }
  fmt::print(out, "# {:<10} {:<24} {:<14} {:>8} {:>12} {:>12}\n", "category", "name", "stream",
             "count", "total (ms)", "mean (ms)");
  for (const auto& [key, total] : totals) {
    const auto& [category, name, stream] = key;
    const double ms = static_cast<double>(total.ns) * 1e-6;
    fmt::print(out, "  {:<10} {:<24} {:<14} {:>8} {:>12.3f} {:>12.4f}\n", name_of(category), name,
               stream, total.count, ms, ms / static_cast<double>(total.count));
  }
}

std::string chrome_trace_events(const std::vector<TraceSpan>& spans, int rank,
                                std::int64_t epoch_ns) {
  using nlohmann::json;
  std::string text;
  const auto append = [&text](const json& event) {
    if (!text.empty()) text += ",\n";
    text += event.dump();
  };
  std::map<std::string, int> threads;
  for (const TraceSpan& span : spans) threads.emplace(span.stream, 0);
  int next = 0;
  for (auto& [stream, tid] : threads) {
    tid = next++;
    append({{"ph", "M"},
            {"name", "thread_name"},
            {"pid", rank},
            {"tid", tid},
            {"args", {{"name", stream}}}});
  }
  if (!spans.empty()) {
    append({{"ph", "M"},
            {"name", "process_name"},
            {"pid", rank},
            {"args", {{"name", fmt::format("rank {}", rank)}}}});
  }
  for (const TraceSpan& span : spans) {
    json args = json::object();
    if (span.label.step >= 0) args["step"] = span.label.step;
    if (span.label.peer >= 0) args["peer"] = span.label.peer;
    if (span.label.bytes >= 0) args["bytes"] = span.label.bytes;
    append({{"ph", "X"},
            {"name", span.label.name},
            {"cat", name_of(span.label.category)},
            {"pid", rank},
            {"tid", threads.at(span.stream)},
            {"ts", static_cast<double>(span.begin_ns - epoch_ns) * 1e-3},
            {"dur", static_cast<double>(span.end_ns - span.begin_ns) * 1e-3},
            {"args", std::move(args)}});
  }
  return text;
}

}  // namespace annulus
