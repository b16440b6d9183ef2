#include <algorithm>
#include <map>
#include <utility>

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

}  // namespace annulus
