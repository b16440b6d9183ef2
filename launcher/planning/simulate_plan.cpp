#include "launcher/planning/simulate_plan.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/chrome_trace.hpp>
#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/ring/simulate.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/pictures/timeline.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"

namespace annulus::launcher {
namespace {

// The most rows of the table unless --show-ranks asks for more.
constexpr int kListedRanks = 32;

std::string milliseconds(double seconds) {
  return fmt::format("{:.3f}", seconds * 1e3);
}

std::string stragglers_text(const ring::Stragglers& stragglers) {
  return fmt::format("each rank computes up to {:g} % longer, seed {}", stragglers.most * 100,
                     stragglers.seed);
}

Report make_report(const PlannedCase& planned, const ring::Stragglers& stragglers,
                   const Options& options) {
  Report report("plan.simulate", planned_record(options, planned.setup.problem),
                {{"rank", "", 6},
                 {"node", "", 6},
                 {"compute", "ms", 10, 0, "copies, kernels and reductions"},
                 {"transfer", "ms", 10, 0, "with messages on their way, hidden or not"},
                 {"wait", "ms", 10, 0, "for messages, with nothing to compute"},
                 {"finish", "ms", 10, 0, "when the rank is done"}},
                {options.wide, options.legend});
  if (assumes_cpu(options)) report.add_meta(kAssumesCpu[0], kAssumesCpu[1]);
  if (planned.backward) report.add_meta("pass", "backward");
  report.add_meta("query", to_string(planned.operands.query));
  report.add_meta("key", to_string(planned.operands.key));
  report.add_meta("layout", why_layout_text(planned.setup));
  report.add_meta("schedule", variant_text(planned.choice));
  report.add_meta("predicted by", predictor_text(planned.model, {planned.model.transport},
                                                 !planned.node_of_rank.empty()));
  if (stragglers.most > 0) report.add_meta("stragglers", stragglers_text(stragglers));
  return report;
}

void add_summary(Report& report, const std::vector<ring::RankTimeline>& timelines, int nodes) {
  ring::RankTimeline most;
  double mean = 0;
  for (const ring::RankTimeline& timeline : timelines) {
    most.compute = std::max(most.compute, timeline.compute);
    most.exposed = std::max(most.exposed, timeline.exposed);
    most.finish = std::max(most.finish, timeline.finish);
    mean += timeline.compute / static_cast<double>(timelines.size());
  }
  report.add_meta("simulated",
                  fmt::format("{} on {}", counted(static_cast<int>(timelines.size()), "rank"),
                              counted(nodes, "node")));
  report.add_meta("finish", milliseconds(most.finish) + " ms, of the slowest rank");
  report.add_meta("compute", fmt::format("{} ms at most, {} ms on average",
                                         milliseconds(most.compute), milliseconds(mean)));
  report.add_meta("wait", milliseconds(most.exposed) + " ms at most");
}

std::string picture_of(const ring::Simulation& simulation, const std::vector<int>& shown,
                       const PlannedCase& planned, double finish) {
  const int ranks = planned.setup.mesh.ranks();
  std::vector<TimelineRow> rows;
  rows.reserve(shown.size());
  for (const int rank : shown) {
    rows.push_back({rank, &simulation.spans(static_cast<std::size_t>(rank))});
  }
  const std::string sample =
      static_cast<int>(shown.size()) < ranks
          ? fmt::format("{} of {} ranks, at equal distances", shown.size(), ranks)
          : counted(ranks, "rank");
  return timeline_picture(
      rows,
      fmt::format("{} on {}, {} {}", variant_text(planned.choice), to_string(planned.setup.mesh),
                  to_string(planned.setup.problem.shape),
                  annulus::name_of(planned.setup.problem.dtype)),
      fmt::format("{}; simulated: {} ms, {}", sample, milliseconds(finish), planned.model.source));
}

TraceOfRanks trace_of(const ring::Simulation& simulation, const std::vector<int>& traced,
                      int ranks) {
  TraceOfRanks trace(static_cast<std::size_t>(ranks));
  for (const int rank : traced) {
    trace[static_cast<std::size_t>(rank)] = simulation.spans(static_cast<std::size_t>(rank));
  }
  return trace;
}

}  // namespace

void check_simulated_ranks(const MeshShape& mesh) {
  if (mesh.ranks() <= kMaximumSimulatedRanks) return;
  throw ArgumentError("--simulate", counted(mesh.ranks(), "rank"),
                      fmt::format("at most {}", kMaximumSimulatedRanks));
}

void simulate_plan(const PlannedCase& planned, const Options& options, std::ostream& out) {
  const int ranks = planned.setup.mesh.ranks();
  const ring::Stragglers stragglers{options.straggler_seed, options.straggler_percent / 100};
  Report report = make_report(planned, stragglers, options);
  // Opened first, so that impossible names of files fail before the work.
  ReportFiles files(options.json, options.csv, report);
  std::optional<files::TextFile> trace_file;
  std::optional<files::TextFile> picture_file;
  if (!options.trace.empty()) {
    as_option("--trace " + options.trace, [&] { trace_file.emplace(options.trace); });
  }
  if (!options.picture.empty()) {
    as_option("--picture " + options.picture, [&] { picture_file.emplace(options.picture); });
  }
  const std::vector<int> traced = spread_ranks(trace_file ? ranks : 0, kMaximumTracedRanks);
  const std::vector<int> pictured = spread_ranks(picture_file ? ranks : 0, kMaximumPicturedRanks);
  std::set<int> recorded(traced.begin(), traced.end());
  recorded.insert(pictured.begin(), pictured.end());

  const ring::PlanInput input = planned.input();
  ring::Simulation simulation(input.prices, variant_text(planned.choice), stragglers);
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  ring::plan_each(input, planned.choice.schedule, all, [&](const ring::RankPlan& rank) {
    simulation.add(rank, recorded.contains(rank.rank));
  });
  const std::vector<ring::RankTimeline> timelines = simulation.run();

  const std::set<int> nodes(planned.node_of_rank.begin(), planned.node_of_rank.end());
  add_summary(report, timelines, std::max(1, static_cast<int>(nodes.size())));
  double finish = 0;
  for (const ring::RankTimeline& timeline : timelines) finish = std::max(finish, timeline.finish);
  if (static_cast<int>(traced.size()) < ranks && trace_file) {
    report.add_meta("traced", fmt::format("{} of {} ranks", traced.size(), ranks));
  }
  Report shown = report;  // the table lists some ranks, files have all
  const auto listed = std::min(static_cast<std::size_t>(std::max(kListedRanks, options.show_ranks)),
                               timelines.size());
  for (std::size_t r = 0; r < timelines.size(); ++r) {
    const ring::RankTimeline& timeline = timelines[r];
    const Row row{std::to_string(r),
                  std::to_string(input.prices.node_of(static_cast<int>(r))),
                  milliseconds(timeline.compute),
                  milliseconds(timeline.transfer),
                  milliseconds(timeline.exposed),
                  milliseconds(timeline.finish)};
    if (r < listed) shown.add_row(row);
    report.add_row(row);
  }
  if (picture_file) {
    as_option("--picture " + options.picture,
              [&] { picture_file->commit(picture_of(simulation, pictured, planned, finish)); });
  }
  if (trace_file) {
    auto about = report.about();
    about.emplace_back("options", options.given);
    as_option("--trace " + options.trace, [&] {
      trace_file->commit(chrome_trace(trace_of(simulation, traced, ranks), about));
    });
  }
  if (!files.replace_table()) {
    shown.write_table(out);
    if (listed < timelines.size()) {
      out << fmt::format("# … {} more ranks (--show-ranks {})\n", timelines.size() - listed, ranks);
    }
  }
  files.write(report, out);
}

}  // namespace annulus::launcher
