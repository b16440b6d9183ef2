#include "launcher/planning/recommend.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
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
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;
constexpr std::array kLayouts{"contiguous", "zigzag", "striped", "balanced"};
// Rows of the table; files have all.
constexpr const char* kSlow = "not worthwhile: takes";
constexpr std::size_t kListed = 20;

/// A problem laid out in some way.
struct Layout {
  std::string mesh;
  std::string name;
  PlannedCase planned;
  double flops = 0;         // of all ranks
  std::vector<int> sample;  // ranks whose plans are made
};

struct Candidate {
  std::string mesh;
  std::string layout;
  ring::ScheduleVariant variant;
  std::string schedule;
  std::string transport;
  std::string why_not;  // cannot run, does not fit, or is not worthwhile; empty if none
  double least = 0;     // seconds that it takes at least
  PredictedRun run;     // 0 seconds: it was not played
  double rate = 0;      // operations per second and rank
  const Layout* laid_out = nullptr;  // null for a mesh that the problem cannot be laid on
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

std::string too_much(double bytes, double limit, const char* how_much) {
  return fmt::format("does not fit: needs {}{:.0f} MiB per rank, of {:.0f}", how_much, bytes / kMiB,
                     limit / kMiB);
}

/// All candidates, of which as few as possible are played: see docs/planning.md.
class Search {
 public:
  Search(const Options& options, const Registry& registry)
      : options_(options), registry_(registry) {
    for (const std::string& mesh : meshes_of(options)) {
      if (options.sequence_layout != "auto" || without_shards(mesh)) {
        lay_out(mesh, options.sequence_layout);
        continue;
      }
      for (const char* layout : kLayouts) lay_out(mesh, layout);
    }
  }

  /// Best first, then those that are not recommended.
  [[nodiscard]] std::vector<Candidate> run() {
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.least < b.least; });
    for (Candidate& one : candidates_) {
      if (one.why_not.empty()) play(one);
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& a, const Candidate& b) {
                       if (a.why_not.empty() != b.why_not.empty()) return a.why_not.empty();
                       if (!a.why_not.empty()) return false;
                       return std::pair(a.run.seconds, a.run.memory_bytes) <
                              std::pair(b.run.seconds, b.run.memory_bytes);
                     });
    return std::move(candidates_);
  }

  /// Ranks whose plans are made, of the layout with most.
  [[nodiscard]] std::size_t most_planned() const { return most_planned_; }

 private:
  // The problem laid out in one way, with every schedule.
  void lay_out(const std::string& mesh, const std::string& layout) {
    Options asked = on_mesh(options_, mesh);
    asked.sequence_layout = layout;
    asked.ranks_per_node = options_.ranks / options_.nodes;
    Candidate candidate;
    candidate.mesh = mesh;
    candidate.layout = without_shards(mesh) ? kNothing : layout;
    try {
      layouts_.push_back(std::make_unique<Layout>(
          Layout{mesh, candidate.layout, lay_out_case(asked, registry_), 0, {}}));
      Layout& made = *layouts_.back();
      candidate.laid_out = &made;
      candidate.transport = made.planned.model.transport;
      const ring::PlanInput input = made.planned.input();
      made.flops = forward_flops(*options_.shape, visible_pairs(made.planned.setup.problem));
      made.sample = ring::sample_ranks(input, ring::kJudges);
      most_planned_ = std::max(most_planned_, made.sample.size());
      const int busiest = ring::busiest_rank(input, made.sample);
      for (const ring::ConsideredVariant& considered :
           ring::variants_for(input, options_.schedule)) {
        Candidate one = candidate;
        one.variant = considered.variant;
        one.schedule = ring::name_of(one.variant.schedule);
        if (!considered.obstacle.empty()) {
          one.why_not = "cannot run: " + considered.obstacle;
        } else if (!considered.pointless.empty()) {
          one.why_not = "not worthwhile: " + considered.pointless;
        } else {
          find_bounds(one, busiest);
        }
        candidates_.push_back(std::move(one));
      }
    } catch (const UserError& error) {
      candidate.schedule = kNothing;
      candidate.why_not = fmt::format("cannot run: {}", error.what());
      candidates_.push_back(candidate);
    }
  }

  [[nodiscard]] static ring::PlanInput input_of(const Candidate& candidate) {
    ring::PlanInput input = candidate.laid_out->planned.input();
    input.options = ring::with_variant(input.options, candidate.variant);
    return input;
  }

  // From the plan of one rank.
  void find_bounds(Candidate& candidate, int rank) {
    const ring::PlanInput input = input_of(candidate);
    try {
      const ring::RankPlan plan = ring::make_rank_plan(input, candidate.variant.schedule, rank);
      candidate.least = ring::least_seconds(plan, input.prices);
      add_memory(candidate.run, plan);
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
    }
    if (is_too_large(candidate)) {
      candidate.why_not = too_much(candidate.run.memory_bytes, options_.memory_bytes, "at least ");
    }
  }

  [[nodiscard]] bool is_too_large(const Candidate& candidate) const {
    return options_.memory_bytes > 0 && candidate.run.memory_bytes > options_.memory_bytes;
  }

  void play(Candidate& candidate) {
    if (best_.size() == kListed && candidate.least > *best_.rbegin()) {
      candidate.why_not = fmt::format("{} {:.3f} ms or more, and {} take less", kSlow,
                                      candidate.least * 1e3, kListed);
      return;
    }
    const Layout& laid_out = *candidate.laid_out;
    try {
      candidate.run = predict_run(input_of(candidate), candidate.variant, laid_out.sample);
    } catch (const UserError& error) {
      candidate.why_not = fmt::format("cannot run: {}", error.what());
      return;
    }
    candidate.rate = laid_out.flops / candidate.run.seconds / options_.ranks;
    if (is_too_large(candidate)) {
      candidate.why_not = too_much(candidate.run.memory_bytes, options_.memory_bytes, "");
      return;
    }
    best_.insert(candidate.run.seconds);
    if (best_.size() > kListed) best_.erase(std::prev(best_.end()));
  }

  const Options& options_;
  const Registry& registry_;
  std::vector<std::unique_ptr<Layout>> layouts_;  // candidates refer to them
  std::vector<Candidate> candidates_;
  std::multiset<double> best_;  // seconds, of those that fit
  std::size_t most_planned_ = 0;
};

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

Row row_of(const Candidate& candidate, bool with_reason) {
  const PredictedRun& run = candidate.run;
  const auto known = [](bool is_known, double value) {
    return is_known ? fmt::format("{:.3f}", value) : std::string(kNothing);
  };
  const auto number = [&](double value) { return known(run.seconds > 0, value); };
  const auto memory = [&](double bytes) { return known(run.memory_bytes > 0, bytes / kMiB); };
  const int split = std::max(candidate.variant.ulysses_degree, candidate.variant.inner_size);
  Row row{candidate.mesh,
          candidate.layout,
          candidate.schedule,
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

// Those that are not recommended, by reason.
void print_others(const std::vector<Candidate>& candidates, std::ostream& out) {
  std::vector<std::string> reasons;
  std::map<std::string, std::vector<std::string>> by_reason;
  for (const Candidate& one : candidates) {
    // Those that are only slow are too many to list.
    const bool is_slow = one.least > 0 && one.run.seconds == 0 && one.why_not.starts_with(kSlow);
    if (one.why_not.empty() || is_slow) continue;
    std::vector<std::string>& named = by_reason[one.why_not];
    if (named.empty()) reasons.push_back(one.why_not);
    named.push_back(fmt::format("{} {} {}", one.mesh, one.layout, one.schedule));
  }
  for (const std::string& reason : reasons) {
    const std::vector<std::string>& named = by_reason[reason];
    const std::size_t colon = reason.find(':');
    out << fmt::format("# {}: {}{}{}\n", reason.substr(0, colon), named.front(),
                       named.size() > 1 ? fmt::format(" and {} more", named.size() - 1) : "",
                       reason.substr(colon));
  }
}

// Throws an error that says what would have been needed.
void refuse(const Options& options, const std::vector<Candidate>& candidates) {
  const Candidate* least = nullptr;
  for (const Candidate& one : candidates) {
    if (options.memory_bytes == 0 || one.run.memory_bytes == 0) continue;
    if (least == nullptr || one.run.memory_bytes < least->run.memory_bytes) least = &one;
  }
  if (least != nullptr) {
    throw ArgumentError("--memory", fmt::format("{:.0f} MiB", options.memory_bytes / kMiB),
                        fmt::format("at least {:.0f} MiB per rank, which {} {} {} needs",
                                    std::ceil(least->run.memory_bytes / kMiB), least->mesh,
                                    least->layout, least->schedule));
  }
  throw UserError(fmt::format("--recommend: none of {} can run on {}: {} {} {} {}",
                              counted(static_cast<std::int64_t>(candidates.size()), "candidate"),
                              counted(options.ranks, "rank"), candidates.front().mesh,
                              candidates.front().layout, candidates.front().schedule,
                              candidates.front().why_not));
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
  Search search(options, registry);
  const std::vector<Candidate> candidates = search.run();
  std::set<std::string> transports;
  std::size_t played = 0;
  for (const Candidate& candidate : candidates) {
    report.add_row(row_of(candidate, true));
    if (!candidate.why_not.empty()) continue;
    transports.insert(candidate.transport);
    if (played++ < kListed) table.add_row(row_of(candidate, false));
  }
  if (played == 0) refuse(options, candidates);
  for (Report* one : {&report, &table}) {
    add_meta(*one, options, predictor_text(model, transports));
    if (static_cast<int>(search.most_planned()) < options.ranks) {
      one->add_meta("planned", fmt::format("{} of {} ranks of each candidate: memory is that of "
                                           "the one with most, moved and across are estimated",
                                           search.most_planned(), options.ranks));
    }
    one->set_verdict(fmt::format("{} of {} candidates compared", played, candidates.size()), true);
  }
  if (!files.replace_table()) {
    table.write_table(out);
    if (played > kListed) out << fmt::format("# … {} slower ones\n", played - kListed);
    print_others(candidates, out);
  }
  files.write(report, out);
}

}  // namespace annulus::launcher
