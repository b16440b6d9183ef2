#include "launcher/planning/recommend.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/planning/planned_case.hpp"
#include "launcher/planning/predicted_run.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/cost_model_option.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;
constexpr std::array kLayouts{"contiguous", "zigzag", "striped", "balanced"};
// Rows of the table; files have all.
constexpr std::size_t kListed = 20;

struct Candidate {
  std::string mesh;
  std::string layout;
  std::string schedule;
  std::string transport;
  PredictedRun run;
  double rate = 0;     // operations per second and rank
  std::string reason;  // why it cannot run; empty if it can
};

// Sizes of dp, tp and sp. Only exchanges along sp belong to attention, so it is laid inside nodes
// as far as it goes.
std::vector<std::string> meshes_of(const Options& options) {
  const int ranks = options.ranks;
  std::vector<std::string> meshes;
  for (int dp = 1; dp <= ranks; ++dp) {
    if (ranks % dp != 0 || (dp > 1 && options.shape->batch % dp != 0)) continue;
    for (int tp = 1; tp <= ranks / dp; ++tp) {
      if ((ranks / dp) % tp != 0 || (tp > 1 && options.shape->heads % tp != 0)) continue;
      meshes.push_back(
          fmt::format("dp={},tp={},{}={}", dp, tp, options.sequence_axis, ranks / dp / tp));
    }
  }
  return meshes;
}

// Whether the mesh leaves the sequence whole. All layouts are the same then.
bool without_shards(const std::string& mesh) {
  return mesh.ends_with("=1");
}

// The problem laid out in one way, with every schedule.
void add_candidates(const Options& options, const Registry& registry, const std::string& mesh,
                    std::vector<Candidate>& candidates) {
  Options asked = options;
  asked.mesh = mesh;
  asked.ranks_per_node = options.ranks / options.nodes;
  Candidate candidate{mesh, without_shards(mesh) ? kNothing : asked.sequence_layout, {}, {}, {}, 0,
                      {}};
  try {
    const PlannedCase planned = lay_out_case(asked, registry);
    candidate.transport = planned.model.transport;
    const ring::PlanInput input = planned.input();
    const double flops = forward_flops(*options.shape, visible_pairs(planned.setup.problem));
    for (const auto& [schedule, obstacle] : ring::schedules_for(input)) {
      if (options.schedule != "auto" && options.schedule != ring::name_of(schedule)) continue;
      candidate.schedule = ring::name_of(schedule);
      candidate.run = {};
      candidate.rate = 0;
      candidate.reason = obstacle;
      try {
        if (obstacle.empty()) {
          candidate.run = predict_run(input, schedule);
          candidate.rate = flops / candidate.run.seconds / options.ranks;
        }
      } catch (const UserError& error) {
        candidate.reason = error.what();
      }
      if (options.memory_bytes > 0 && candidate.run.memory_bytes > options.memory_bytes) {
        candidate.reason =
            fmt::format("needs {:.0f} MiB per rank, of {:.0f}", candidate.run.memory_bytes / kMiB,
                        options.memory_bytes / kMiB);
      }
      candidates.push_back(candidate);
    }
  } catch (const UserError& error) {
    candidate.schedule = kNothing;
    candidate.reason = error.what();
    candidates.push_back(candidate);
  }
}

std::vector<Candidate> all_candidates(const Options& options, const Registry& registry) {
  std::vector<Candidate> candidates;
  for (const std::string& mesh : meshes_of(options)) {
    if (options.sequence_layout != "auto" || without_shards(mesh)) {
      add_candidates(options, registry, mesh, candidates);
      continue;
    }
    for (const char* layout : kLayouts) {
      Options with_layout = options;
      with_layout.sequence_layout = layout;
      add_candidates(with_layout, registry, mesh, candidates);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     if (a.reason.empty() != b.reason.empty()) return a.reason.empty();
                     if (!a.reason.empty()) return false;
                     return std::pair(a.run.seconds, a.run.memory_bytes) <
                            std::pair(b.run.seconds, b.run.memory_bytes);
                   });
  return candidates;
}

std::vector<Column> columns(bool with_reason) {
  std::vector<Column> all{
      {"mesh", "", 18},
      {"layout", "", 10},
      {"schedule", "", 11},
      {"time", "ms, predicted", 10, 0, "of the slowest rank"},
      {"rate", "TFLOP/s/rank", 0, 0, "2 N (D + Dv) operations per visible pair"},
      {"memory", "MiB/rank, most", 0, 0, "shards and buffers of the rank with most"},
      {"shards", "MiB/rank, most", 0, 2, "of query, key, value, output and the like"},
      {"buffers", "MiB/rank, most", 0, 3, "of transfers and partial results"},
      {"moved", "MiB, total", 10, 4, "received by all ranks"},
      {"across", "MiB, total", 10, 1, "of this, from other nodes"}};
  if (with_reason) all.push_back({"cannot", "", 10, 5, "why it cannot run"});
  return all;
}

Row row_of(const Candidate& candidate, bool with_reason) {
  const PredictedRun& run = candidate.run;
  const bool predicted = run.seconds > 0;
  const auto number = [&](double value) {
    return predicted ? fmt::format("{:.3f}", value) : std::string(kNothing);
  };
  Row row{candidate.mesh,
          candidate.layout,
          candidate.schedule,
          number(run.seconds * 1e3),
          number(candidate.rate * 1e-12),
          number(run.memory_bytes / kMiB),
          number(run.shard_bytes / kMiB),
          number(run.buffer_bytes / kMiB),
          number(run.received_bytes / kMiB),
          number(run.across_bytes / kMiB)};
  if (with_reason) row.push_back(candidate.reason.empty() ? kNothing : candidate.reason);
  return row;
}

void add_meta(Report& report, const Options& options, const std::string& predictor) {
  report.add_meta("problem", fmt::format("{} {}", to_string(*options.shape),
                                         name_of(options.dtype.value_or(DType::float32))));
  report.add_meta("ranks", fmt::format("{} on {}", counted(options.ranks, "rank"),
                                       counted(options.nodes, "node")));
  if (options.memory_bytes > 0) {
    report.add_meta("memory", fmt::format("{:.0f} MiB per rank", options.memory_bytes / kMiB));
  }
  report.add_meta("predicted by", predictor);
}

// Those that cannot run, by reason.
void print_refused(const std::vector<Candidate>& candidates, std::ostream& out) {
  std::vector<std::string> reasons;
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const Candidate& one : candidates) {
    if (one.reason.empty()) continue;
    std::vector<std::string>& named = by_reason[one.reason];
    if (named.empty()) reasons.push_back(one.reason);
    named.push_back(fmt::format("{} {} {}", one.mesh, one.layout, one.schedule));
  }
  for (const std::string& reason : reasons) {
    const std::vector<std::string>& named = by_reason[reason];
    out << fmt::format("# cannot run: {}{}: {}\n", named.front(),
                       named.size() > 1 ? fmt::format(" and {} more", named.size() - 1) : "",
                       reason);
  }
}

}  // namespace

void recommend(const Options& options, const Registry& registry, std::ostream& out) {
  if (options.ranks == 0) throw ArgumentError("--ranks", "nothing", "the number of ranks");
  if (!options.shape) {
    throw ArgumentError("--shape", "nothing", "B,T,S,N,K,D or B,T,S,N,K,D,Dv");
  }
  if (options.ranks % options.nodes != 0) {
    throw ArgumentError("--nodes", std::to_string(options.nodes),
                        fmt::format("a divisor of {} ranks", options.ranks));
  }
  Report report("plan.recommend", {}, columns(true), {options.wide, options.legend});
  Report table("plan.recommend", {}, columns(false), {options.wide, options.legend});
  ReportFiles files(options.json, options.csv, report);
  const ring::CostModel model = cost_model_of(options, planned_place(options));
  const std::vector<Candidate> candidates = all_candidates(options, registry);
  std::set<std::string> transports;
  std::size_t possible = 0;
  for (const Candidate& candidate : candidates) {
    report.add_row(row_of(candidate, true));
    if (!candidate.reason.empty()) continue;
    transports.insert(candidate.transport);
    if (possible++ < kListed) table.add_row(row_of(candidate, false));
  }
  for (Report* one : {&report, &table}) {
    add_meta(*one, options, predictor_text(model, transports));
  }
  const std::string verdict =
      fmt::format("{} of {} candidates can run", possible, candidates.size());
  report.set_verdict(verdict, possible > 0);
  table.set_verdict(verdict, possible > 0);
  if (!files.replace_table()) {
    table.write_table(out);
    if (possible > kListed) out << fmt::format("# … {} slower ones\n", possible - kListed);
    print_refused(candidates, out);
  }
  files.write(report, out);
}

}  // namespace annulus::launcher
