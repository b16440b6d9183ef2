#include "launcher/report/trace_file.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <nlohmann/json.hpp>

#include <annulus/core/chrome_trace.hpp>
#include <annulus/mesh/agreement.hpp>

#include "launcher/options/as_option.hpp"

namespace annulus::launcher {
namespace {

// Enough rounds for one of them to be quick.
constexpr int kClockRounds = 20;

struct RankTrace {
  std::vector<TraceSpan> spans;
  ClockSamples clock;
};

std::string pack(const RankTrace& trace) {
  using nlohmann::json;
  std::string bytes;
  json::to_cbor(json{{"spans", json::binary([&] {
                        const std::string spans = pack_spans(trace.spans);
                        return std::vector<std::uint8_t>(spans.begin(), spans.end());
                      }())},
                     {"before", trace.clock.before},
                     {"after", trace.clock.after}},
                bytes);
  return bytes;
}

RankTrace unpack(const std::string& bytes) {
  const nlohmann::json trace = nlohmann::json::from_cbor(bytes);
  const auto& spans = trace.at("spans").get_binary();
  return {unpack_spans({spans.begin(), spans.end()}), {trace.at("before"), trace.at("after")}};
}

}  // namespace

ClockSamples sample_clock(Control& group, int rounds, const std::function<std::int64_t()>& clock) {
  ClockSamples samples;
  for (int i = 0; i < rounds; ++i) {
    samples.before.push_back(clock());
    group.barrier("comparison of clocks");
    samples.after.push_back(clock());
  }
  return samples;
}

std::int64_t clock_offset(const ClockSamples& clock, const ClockSamples& reference) {
  const std::size_t rounds = std::min(clock.after.size(), reference.after.size());
  if (rounds == 0) return 0;
  std::int64_t least = std::numeric_limits<std::int64_t>::min();
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < rounds; ++i) {
    least = std::max(least, clock.before[i] - reference.after[i]);
    most = std::min(most, clock.after[i] - reference.before[i]);
  }
  return least + (most - least) / 2;
}

TraceOfRanks gather_trace(const std::vector<TraceSpan>& spans, Mesh& mesh) {
  const Topology& topology = mesh.topology();
  const int rounds = topology.nodes() > 1 ? kClockRounds : 0;
  const RankTrace own{spans, sample_clock(mesh.world(), rounds, monotonic_ns)};
  const std::vector<std::string> packed =
      mesh.world().collect_text(pack(own), "traces of the ranks");
  if (mesh.rank() != 0) return {};
  TraceOfRanks ranks;
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    RankTrace trace = unpack(packed[rank]);
    // Ranks of one node share a clock.
    const bool far = topology.node_of_rank[rank] != topology.node_of_rank[0];
    const std::int64_t offset = far ? clock_offset(trace.clock, own.clock) : 0;
    for (TraceSpan& span : trace.spans) {
      span.begin_ns -= offset;
      span.end_ns -= offset;
    }
    ranks.push_back(std::move(trace.spans));
  }
  begin_when_moving(ranks);
  return ranks;
}

TraceFile::TraceFile(const std::string& path, Control& group)
    : group_(group), shown_("--trace " + path) {
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    as_option(shown_, [&] { file_.emplace(path); });
  });
}

void TraceFile::commit(const TraceOfRanks& ranks, const Report& report) {
  collectively(group_, [&] {
    if (!file_) return;
    as_option(shown_, [&] { file_->commit(chrome_trace(ranks, report.about())); });
  });
}

}  // namespace annulus::launcher
