#include "launcher/planning/recommend.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/recommend.hpp>

#include "launcher/planning/planned_case.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;

using ring::Recommendation;

std::string layout_cell(const Recommendation& one) {
  return one.layout ? std::string(annulus::name_of(*one.layout)) : kNothing;
}

std::string schedule_cell(const Recommendation& one) {
  return one.variant ? std::string(ring::name_of(one.variant->schedule)) : kNothing;
}

// "dp=1,tp=2,sp=4 zigzag ring".
std::string name_of(const Recommendation& one) {
  return fmt::format("{} {} {}", one.mesh, layout_cell(one), schedule_cell(one));
}

std::vector<Column> columns(bool with_reason) {
  std::vector<Column> all{
      {"mesh", "", 18},
      {"layout", "", 10},
      {"schedule", "", 11},
      {"split", "ranks", 5, 0, "ulysses degree of hybrid, inner size of double_ring"},
      {"time", "ms, predicted", 10, 0, "of the slowest rank"},
      {"rate", "TFLOP/s/rank", 0, 0, "2 N (D + Dv) operations per visible pair"},
      {"memory", "MiB/rank, most", 0, 0, "shards and buffers of the rank with most"},
      {"shards", "MiB/rank, most", 0, 2, "of query, key, value, output and the like"},
      {"buffers", "MiB/rank, most", 0, 3, "of transfers and partial results"},
      {"moved", "MiB, total", 10, 4, "received by all ranks"},
      {"across", "MiB, total", 10, 1, "of this, from other nodes"}};
  if (with_reason) {
    all.push_back({"why not", "", 10, 5, "why it cannot run, does not fit or is not worthwhile"});
  }
  return all;
}

Row row_of(const Recommendation& candidate, bool with_reason) {
  const ring::PredictedRun& run = candidate.run;
  const auto known = [](bool is_known, double value) {
    return is_known ? fmt::format("{:.3f}", value) : std::string(kNothing);
  };
  const auto number = [&](double value) { return known(run.seconds > 0, value); };
  const auto memory = [&](double bytes) { return known(run.memory_bytes > 0, bytes / kMiB); };
  const ring::ScheduleVariant variant = candidate.variant.value_or(ring::ScheduleVariant{});
  const int split = std::max(variant.ulysses_degree, variant.inner_size);
  Row row{candidate.mesh,
          layout_cell(candidate),
          schedule_cell(candidate),
          split > 0 ? std::to_string(split) : kNothing,
          number(run.seconds * 1e3),
          number(candidate.rate * 1e-12),
          memory(run.memory_bytes),
          memory(run.shard_bytes),
          memory(run.buffer_bytes),
          number(run.received_bytes / kMiB),
          number(run.across_bytes / kMiB)};
  if (with_reason) row.push_back(candidate.why_not.empty() ? kNothing : candidate.why_not);
  return row;
}

void add_meta(Report& report, const Options& options, const AttentionProblem& problem,
              const std::string& predictor) {
  report.add_meta("options", options.given);
  report.add_meta("problem", problem_text(problem));
  report.add_meta("ranks", fmt::format("{} on {}", counted(options.ranks, "rank"),
                                       counted(options.nodes, "node")));
  if (options.memory_bytes > 0) {
    report.add_meta("memory", fmt::format("{:.0f} MiB per rank", options.memory_bytes / kMiB));
  }
  report.add_meta("predicted by", predictor);
}

// Prints the candidates that are not recommended, by reason.
void print_others(const std::vector<Recommendation>& candidates, std::ostream& out) {
  std::vector<std::string> reasons;
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const Recommendation& one : candidates) {
    if (one.why_not.empty() || one.is_slow) continue;  // slow ones are too many to list
    std::vector<std::string>& named = by_reason[one.why_not];
    if (named.empty()) reasons.push_back(one.why_not);
    named.push_back(name_of(one));
  }
  for (const std::string& reason : reasons) {
    const std::vector<std::string>& named = by_reason[reason];
    const std::size_t colon = reason.find(':');
    out << fmt::format("# {}: {}{}{}\n", reason.substr(0, colon), named.front(),
                       named.size() > 1 ? fmt::format(" and {} more", named.size() - 1) : "",
                       reason.substr(colon));
  }
}

// Throws an error that says what would be needed.
void refuse(const Options& options, const std::vector<Recommendation>& candidates) {
  const Recommendation* least = nullptr;
  for (const Recommendation& one : candidates) {
    if (options.memory_bytes == 0 || one.run.memory_bytes == 0) continue;
    if (least == nullptr || one.run.memory_bytes < least->run.memory_bytes) least = &one;
  }
  if (least != nullptr) {
    throw ArgumentError("--memory", fmt::format("{:.0f} MiB", options.memory_bytes / kMiB),
                        fmt::format("at least {:.0f} MiB per rank, which {} needs",
                                    std::ceil(least->run.memory_bytes / kMiB), name_of(*least)));
  }
  throw UserError(fmt::format("--recommend: none of {} can run on {}: {} {}",
                              counted(static_cast<std::int64_t>(candidates.size()), "candidate"),
                              counted(options.ranks, "rank"), name_of(candidates.front()),
                              candidates.front().why_not));
}

// The problem without its mesh.
AttentionOptions problem_of(const Options& options, const ring::CostModel& model) {
  const Options alone = on_mesh(options, fmt::format("dp=1,tp=1,{}=1", options.sequence_axis));
  AttentionOptions problem =
      set_up_problem(alone, *options.shape, options.dtype.value_or(DType::float32), /*ranks=*/0)
          .problem;
  if (options.sequence_layout == "auto") problem.layout.reset();  // to be found
  problem.transport = options.transport;
  problem.cost_model = std::make_shared<ring::CostModel>(model);
  return problem;
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
  const AttentionOptions problem = problem_of(options, model);
  const ring::Recommendations found =
      ring::recommend(problem,
                      {options.ranks, options.nodes, options.memory_bytes, planned_place(options),
                       options.sequence_axis},
                      registry);
  const std::vector<Recommendation>& candidates = found.all;
  std::set<std::string> transports;
  std::size_t played = 0;
  for (const Recommendation& candidate : candidates) {
    report.add_row(row_of(candidate, true));
    if (!candidate.why_not.empty()) continue;
    transports.insert(candidate.transport);
    if (played++ < ring::kRecommended) table.add_row(row_of(candidate, false));
  }
  if (played == 0) refuse(options, candidates);
  for (Report* one : {&report, &table}) {
    add_meta(*one, options, problem, predictor_text(model, transports));
    if (static_cast<int>(found.most_planned) < options.ranks) {
      one->add_meta("planned", fmt::format("{} of {} ranks of each candidate: memory is that of "
                                           "the one with most, moved and across are estimated",
                                           found.most_planned, options.ranks));
    }
    one->set_verdict(fmt::format("{} of {} candidates compared", played, candidates.size()), true);
  }
  if (!files.replace_table()) {
    table.write_table(out);
    if (played > ring::kRecommended) {
      out << fmt::format("# … {} slower ones\n", played - ring::kRecommended);
    }
    print_others(candidates, out);
  }
  files.write(report, out);
}

}  // namespace annulus::launcher
