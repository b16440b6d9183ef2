#include "launcher/report/trace_file.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include <annulus/mesh/agreement.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

// The earliest begin of the spans of all ranks. Nanoseconds since boot are exact in a double for
// 104 days; later they lose a nanosecond or two, which only moves the origin.
std::int64_t earliest(const std::vector<TraceSpan>& spans, Control& group) {
  double first = std::numeric_limits<double>::max();
  for (const TraceSpan& span : spans) first = std::min(first, static_cast<double>(span.begin_ns));
  const double earliest = -group.max(std::array{-first}).front();
  return earliest == std::numeric_limits<double>::max() ? 0 : static_cast<std::int64_t>(earliest);
}

}  // namespace

TraceFile::TraceFile(const std::string& path, Control& group) : group_(group) {
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    as_option("--trace " + path, [&] { file_.emplace(path); });
  });
}

void TraceFile::commit(const std::vector<TraceSpan>& spans) {
  const std::int64_t epoch = earliest(spans, group_);
  const std::vector<std::string> pieces =
      group_.collect_text(chrome_trace_events(spans, group_.rank(), epoch));
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
    bool first = true;
    for (const std::string& piece : pieces) {
      if (piece.empty()) continue;
      text += (first ? "" : ",\n") + piece;
      first = false;
    }
    file_->commit(text + "\n]}\n");
  });
}

}  // namespace annulus::launcher
