#include "launcher/planning/simulate_plan.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/chrome_trace.hpp>
#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/simulate.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"

namespace annulus::launcher {
namespace {

// The most rows of the table unless --show-ranks asks for more.
constexpr int kListedRanks = 32;

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
  add_assumed_device(report, options);
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

void add_summary(Report& report, const std::vector<ring::RankTimeline>& timelines,
                 const std::vector<int>& simulated, const PlannedCase& planned) {
  const std::set<int> nodes(planned.node_of_rank.begin(), planned.node_of_rank.end());
  std::set<int> simulated_nodes;
  for (const int rank : simulated) {
    if (!nodes.empty()) {
      simulated_nodes.insert(planned.node_of_rank[static_cast<std::size_t>(rank)]);
    }
  }
  const ring::RankTimeline most = most_of(timelines);
  double mean = 0;
  for (const ring::RankTimeline& timeline : timelines) {
    mean += timeline.compute / static_cast<double>(timelines.size());
  }
  const int ranks = planned.setup.mesh.ranks();
  std::string text = fmt::format("{} on {}", counted(ranks, "rank"),
                                 counted(std::max(1, static_cast<int>(nodes.size())), "node"));
  if (static_cast<int>(simulated.size()) < ranks) {
    text += fmt::format(
        ", by {} of them{} (--show-ranks {}: by all)", simulated.size(),
        nodes.empty() ? "" : " on " + counted(static_cast<int>(simulated_nodes.size()), "node"),
        ranks);
  }
  report.add_meta("simulated", text);
  report.add_meta("finish", predicted_cell(most.finish) + " ms, of the slowest rank");
  report.add_meta("compute", fmt::format("{} ms at most, {} ms on average",
                                         predicted_cell(most.compute), predicted_cell(mean)));
  report.add_meta("wait", predicted_cell(most.exposed) + " ms at most");
}

// At most `most` of the numbers from 0 to `count` − 1, in order: the first, the last, and others at
// equal distances.
std::vector<int> spread_over(int count, int most) {
  const int chosen_count = std::min(count, most);
  std::vector<int> chosen;
  for (int i = 0; i < chosen_count; ++i) {
    chosen.push_back(chosen_count == 1
                         ? 0
                         : static_cast<int>(std::int64_t{i} * (count - 1) / (chosen_count - 1)));
  }
  return chosen;
}

TraceOfRanks trace_of(const ring::Simulation& simulation, const std::vector<int>& traced,
                      const std::vector<int>& simulated, int ranks) {
  TraceOfRanks trace(static_cast<std::size_t>(ranks));
  for (const int index : traced) {
    const int rank = simulated[static_cast<std::size_t>(index)];
    trace[static_cast<std::size_t>(rank)] = simulation.spans(static_cast<std::size_t>(index));
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
  const ring::PlanInput input = planned.input();
  const int ranks = planned.setup.mesh.ranks();
  // A rank that is to be shown is simulated.
  const std::vector<int> simulated =
      ring::simulated_ranks(input, options.show_ranks >= ranks ? ranks : ring::kAllSimulated);
  const ring::Stragglers stragglers{options.straggler_seed, options.straggler_percent / 100};
  Report report = make_report(planned, stragglers, options);
  // Opened first, so that impossible names of files fail before the work.
  ReportFiles files(options.json, options.csv, report);
  std::optional<files::TextFile> trace_file;
  if (!options.trace.empty()) {
    as_option("--trace " + options.trace, [&] { trace_file.emplace(options.trace); });
  }
  const auto count = static_cast<int>(simulated.size());
  // Indices of simulated ranks.
  const std::vector<int> traced = spread_over(trace_file ? count : 0, kMaximumTracedRanks);

  ring::Simulation simulation(input.prices, variant_text(planned.choice), stragglers);
  int added = 0;
  ring::plan_each(input, planned.choice.schedule, simulated, [&](const ring::RankPlan& rank) {
    simulation.add(rank, std::ranges::binary_search(traced, added));
    ++added;
  });
  const std::vector<ring::RankTimeline> timelines = simulation.run();

  add_summary(report, timelines, simulated, planned);
  if (static_cast<int>(traced.size()) < count && trace_file) {
    report.add_meta("traced", fmt::format("{} of {} ranks", traced.size(), count));
  }
  Report shown = report;  // the table lists some ranks, files have all
  const auto listed = std::min(static_cast<std::size_t>(std::max(kListedRanks, options.show_ranks)),
                               timelines.size());
  for (std::size_t r = 0; r < timelines.size(); ++r) {
    const ring::RankTimeline& timeline = timelines[r];
    const int rank = simulated[r];
    const Row row{std::to_string(rank),
                  std::to_string(input.prices.node_of(rank)),
                  predicted_cell(timeline.compute),
                  predicted_cell(timeline.transfer),
                  predicted_cell(timeline.exposed),
                  predicted_cell(timeline.finish)};
    if (r < listed) shown.add_row(row);
    report.add_row(row);
  }
  if (trace_file) {
    auto about = report.about();
    about.emplace_back("options", options.given);
    as_option("--trace " + options.trace, [&] {
      trace_file->commit(chrome_trace(trace_of(simulation, traced, simulated, ranks), about));
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
