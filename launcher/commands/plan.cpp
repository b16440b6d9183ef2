#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/ring/balance.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/simulate.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/commands/plan_json.hpp"
#include "launcher/options/as_option.hpp"
#include "launcher/planning/planned_case.hpp"
#include "launcher/planning/recommend.hpp"
#include "launcher/planning/scaling.hpp"
#include "launcher/planning/simulate_plan.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/operations.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// The most rows in the table of ranks; the other table has the maximum and the mean over all ranks.
constexpr std::size_t kListedRanks = 32;
constexpr std::array kLayouts{LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                              LayoutKind::balanced};

double gflop(const PlannedCase& planned, double work) {
  const AttentionShape& shape = planned.setup.problem.shape;
  const double pairs = work / static_cast<double>(shape.heads);
  return (planned.backward ? backward_flops(shape, pairs) : forward_flops(shape, pairs)) * 1e-9;
}

/// Collects the row of a layout from the plans of its ranks. Plans are not kept, as many would be
/// large.
class LayoutFigures {
 public:
  explicit LayoutFigures(const PlannedCase& planned, const ring::Prices& prices)
      : simulation_(prices, variant_text(planned.choice)) {}

  void add(const ring::RankPlan& rank) {
    const std::vector<const ring::Exchange*> exchanges = rank.all<ring::Exchange>();
    for (const ring::Exchange* exchange : exchanges) {
      double bytes = 0;
      for (const ring::Transfer& transfer : exchange->receives) {
        bytes += static_cast<double>(transfer.bytes);
      }
      hop_bytes = std::max(hop_bytes, bytes);
      bytes_ += bytes;
      messages = std::max(messages, static_cast<std::int64_t>(exchange->receives.size()));
    }
    hops = std::max(hops, static_cast<std::int64_t>(exchanges.size()));
    buffers = std::max(buffers, static_cast<double>(rank.buffer_bytes(ring::BufferKind::exchange)));
    work.push_back({rank.rank, rank.work()});
    simulation_.add(rank);
    ++ranks_;
  }

  /// Bytes received by `ranks` ranks, estimated if only some of them were added.
  [[nodiscard]] double bytes(int ranks) const {
    return ranks_ == 0 ? 0 : bytes_ * static_cast<double>(ranks) / static_cast<double>(ranks_);
  }
  /// To be called once.
  [[nodiscard]] std::vector<ring::RankTimeline> simulate() { return simulation_.run(); }

  std::int64_t hops = 0;      ///< most steps with transfers of a rank
  double hop_bytes = 0;       ///< most bytes that a rank receives in one step
  std::int64_t messages = 0;  ///< most messages that a rank receives in one step
  double buffers = 0;         ///< most buffer memory of a rank, in bytes
  std::vector<ring::RankWork> work;

 private:
  ring::Simulation simulation_;
  double bytes_ = 0;  // received by the ranks that were added
  int ranks_ = 0;
};

// The bytes that all ranks receive if each gets all keys and values that it does not hold.
double dense_bytes(const ring::ShardedOperands& operands, DType dtype) {
  const Extents key = operands.key.local_shape(0);
  const int shards = operands.key.shards(1);
  const double groups = operands.key.mesh().ranks() / static_cast<double>(shards);
  return groups * (shards - 1) *
         static_cast<double>(operands.key.global_shape()[1] * key[0] * key[2] *
                             (key[3] + operands.value.global_shape()[3])) *
         static_cast<double>(size_of(dtype));
}

// "626 TFLOP/s", without digits that a prediction does not know.
std::string rate_text(double rate) {
  return rate < 1e12 ? fmt::format("{:.0f} GFLOP/s", rate * 1e-9)
                     : fmt::format("{:.0f} TFLOP/s", rate * 1e-12);
}

// The assumptions behind predictions, for the implementations that compute blocks.
std::string cost_assumptions(const ring::Prices& prices, const ring::Plan& plan) {
  constexpr double kLong = 16 << 10;  // rows
  constexpr double kLarge = 64 << 20;
  std::set<std::string> used;
  for (const ring::RankPlan& rank : plan.ranks) {
    for (const ring::Tile* block : rank.tiles()) {
      used.insert(rank.implementations[static_cast<std::size_t>(block->implementation)]);
    }
  }
  std::string kernels;
  for (const std::string& name : used) {
    const ring::KernelCost& cost = prices.kernel(name);
    kernels += fmt::format("{} ({}) {} on 16k rows and {:.1f} us per call, ", name,
                           ring::name_of(cost.knowledge), rate_text(cost.rate.clamped(kLong)),
                           cost.call_latency * 1e6);
  }
  const ring::CostModel& model = prices.model;
  return fmt::format("{}: {}64 MiB by {} at {:.0f} GB/s{}, merging {:.0f} GB/s", model.source,
                     kernels, model.transport, kLarge / model.transfer_seconds(kLarge) * 1e-9,
                     network_text(model, !prices.node_of_rank.empty()),
                     model.merge_bytes_per_second * 1e-9);
}

// True if ranks compute the rows that they hold.
bool rows_stay(ring::Schedule schedule) {
  return schedule != ring::Schedule::pass_q && schedule != ring::Schedule::ulysses &&
         schedule != ring::Schedule::hybrid;
}

// `figures` come from the planned ranks.
void add_layout(Report& report, const PlannedCase& planned, const ring::PlanInput& input,
                LayoutFigures& figures, LayoutKind layout) {
  const ring::ShardedOperands& operands = input.operands;
  const ring::WorkOfRanks work = ring::work_of_ranks(input, figures.work);
  const double dense = dense_bytes(operands, input.problem.dtype);
  const double bytes = figures.bytes(operands.key.mesh().ranks());
  const ring::RankTimeline most = most_of(figures.simulate());
  report.add_row({std::string(annulus::name_of(layout)),
                  layout == planned.setup.layout.sequence ? "yes" : "no",
                  fmt::format("{:.3f}", gflop(planned, work.most)),
                  percent_cell(work.mean > 0 ? work.most / work.mean - 1 : 0, 2),
                  percent_cell(rows_stay(planned.choice.schedule)
                                   ? ring::tile_imbalance(input.problem, operands.query)
                                   : std::nullopt,
                               2),
                  std::to_string(figures.hops), std::to_string(figures.messages),
                  mebibytes_cell(figures.hop_bytes), mebibytes_cell(bytes),
                  percent_cell(dense > 0 ? std::optional(bytes / dense) : std::nullopt, 2),
                  mebibytes_cell(figures.buffers), predicted_cell(most.exposed),
                  predicted_cell(most.finish)});
}

// True if the balanced layout is planned for comparison. Very long sequences have none (`tiles` is
// null). On many ranks planning takes a second, which is wasted if the work is even already.
bool wants_balanced(const PlannedCase& planned, const ring::Plan& plan) {
  constexpr int kMany = 256;
  constexpr double kEven = 0.01;
  const std::optional<double> tiles =
      ring::tile_imbalance(planned.setup.problem, planned.operands.query);
  if (!tiles) return false;
  return planned.setup.mesh.ranks() <= kMany || *tiles >= kEven || plan.imbalance() >= kEven;
}

Report layouts_report(const PlannedCase& planned, const ring::Plan& chosen_plan,
                      const ring::Prices& prices, const Options& options) {
  Report report(
      "plan", planned_record(options, planned.setup.problem),
      {{"layout", "", 10},
       {"chosen", "", 6},
       {"work", "GFLOP, most", 0, 0,
        planned.backward ? "2 N (3 D + 2 Dv) operations per visible pair"
                         : "2 N (D + Dv) operations per visible pair"},
       {"imbalance", "%", 9, 0, "work of the rank with most, above the mean of all"},
       {"tiles", "imbalance, %", 12, 0,
        "the same for tiles of at most 128 x 128 pairs with a visible pair, which are what GPU "
        "kernels compute; none where queries or heads move to other ranks"},
       {"hops", "most", 6, 0, "steps with transfers, of the rank with most"},
       {"messages", "most", 0, 3, "that a rank receives in one step"},
       {"hop", "MiB/rank, most", 0, 2, "that a rank receives in one step"},
       {"moved", "MiB, total", 10, 1, "received by all ranks"},
       {"of dense", "%", 8, 0, "moved, as a share of an all-gather of all keys and values"},
       {"buffers", "MiB/rank, most", 0, 3, "of transfers"},
       {"wait", "ms, predicted", 10, 0,
        "for transfers, with nothing to compute; of the rank that waits longest"},
       {"time", "ms, predicted", 10, 0, "of the slowest rank"}},
      {options.wide, options.legend});
  if (planned.backward) {
    report.add_meta(
        "pass",
        fmt::format(
            "backward{}{}", planned.backward->grad_bias ? ", with the bias's gradient" : "",
            adds_rounded_gradients(chosen_plan) ? ", parts of gradients sent in bfloat16" : ""));
  }
  report.add_meta("query", to_string(planned.operands.query));
  report.add_meta("key", to_string(planned.operands.key));
  if (planned.operands.bias) report.add_meta("bias", to_string(*planned.operands.bias));
  if (planned.operands.dense_mask) report.add_meta("mask", to_string(*planned.operands.dense_mask));
  report.add_meta("layout", why_layout_text(planned.setup));
  report.add_meta("schedule", variant_text(planned.choice));
  add_price_of_order(planned.choice, planned.backward ? "backward" : "forward", report);
  if (options.explain) {
    Explanation explanation(report);
    explanation.add(planned.selection, planned.choice);
    explanation.add(prices);
  }
  report.add_meta("predicted by", cost_assumptions(prices, chosen_plan));
  for (const LayoutKind layout : kLayouts) {
    LayoutFigures figures(planned, prices);
    if (layout == planned.setup.layout.sequence) {
      for (const ring::RankPlan& rank : chosen_plan.ranks) figures.add(rank);
      add_layout(report, planned, planned.input(), figures, layout);
      continue;
    }
    const ring::ShardedOperands& held = planned.operands;
    if (held.query.shards(1) == 1 && held.key.shards(1) == 1) continue;  // all are the same
    // Striped, every rank has pieces of many documents, which take long to plan. It takes no
    // granule.
    const bool striped = layout == LayoutKind::striped;
    if (striped && planned.setup.problem.mask.has_segments()) continue;
    if (striped && planned.setup.layout.granule.value_or(1) > 1) continue;
    if (layout == LayoutKind::balanced && !wants_balanced(planned, chosen_plan)) continue;
    ring::OperandLayout other = planned.setup.layout;
    other.sequence = layout;
    const ring::ShardedOperands operands =
        ring::shard_operands(planned.setup.problem, planned.setup.mesh, other);
    const ring::PlanInput input = planned.input(operands);
    try {
      ring::plan_each(input, planned.choice.schedule, ring::simulated_ranks(input),
                      [&](const ring::RankPlan& rank) { figures.add(rank); });
    } catch (const UnsupportedError&) {
      // Only layouts in global order have a plan with the same bits on any number of ranks.
      if (!planned.setup.problem.in_global_order()) throw;
      continue;
    }
    add_layout(report, planned, input, figures, layout);
  }
  return report;
}

Report ranks_report(const PlannedCase& planned, const ring::Plan& plan, const ring::Prices& prices,
                    const Options& options, std::size_t listed) {
  Report report("plan.ranks", planned_record(options, planned.setup.problem),
                {{"rank", "", 6},
                 {"queries", "", 12, 0, "positions that the rank holds"},
                 {"keys", "", 12, 1, "likewise"},
                 {"work", "GFLOP", 10},
                 {"sent", "MiB", 10, 0, "over all steps"},
                 {"received", "MiB", 10, 0, "over all steps"},
                 {"buffers", "MiB", 10, 2, "of transfers"},
                 {"wait", "ms, predicted", 10, 0, "for transfers, with nothing to compute"},
                 {"finish", "ms, predicted", 10, 0, "when the rank is done, waiting included"}},
                {options.wide, options.legend});
  const std::vector<ring::RankTimeline> timelines = ring::simulate(plan, prices);
  for (std::size_t i = 0; i < listed; ++i) {
    const ring::RankPlan& rank = plan.ranks[i];
    const auto mib = [](std::int64_t bytes) { return mebibytes_cell(static_cast<double>(bytes)); };
    report.add_row({std::to_string(rank.rank),
                    to_string(planned.operands.query.positions(rank.rank, 1)),
                    to_string(planned.operands.key.positions(rank.rank, 1)),
                    fmt::format("{:.3f}", gflop(planned, rank.work())), mib(rank.bytes_sent()),
                    mib(rank.bytes_received()), mib(rank.buffer_bytes(ring::BufferKind::exchange)),
                    predicted_cell(timelines[i].exposed), predicted_cell(timelines[i].finish)});
  }
  return report;
}

void print(const PlannedCase& planned, const ring::Plan& plan, const ring::Prices& prices,
           const Report& layouts, const Options& options, std::ostream& out) {
  if (const std::string device = assumed_device(options); !device.empty()) {
    out << "# device: " << device << '\n';
  }
  print_plan(plan, options.show_ranks, out);
  layouts.write_table(out);
  out << '\n';
  const std::size_t ranks = plan.ranks.size();
  const std::size_t listed =
      std::min(ranks, std::max(kListedRanks, static_cast<std::size_t>(options.show_ranks)));
  ranks_report(planned, plan, prices, options, listed).write_table(out);
  if (listed < ranks) {
    out << fmt::format("# … {} more ranks (--show-ranks {})\n", ranks - listed, ranks);
  }
}

// Shows the plan of some ranks, and compares its layout with others.
void show_plan(const PlannedCase& planned, const ring::Plan& plan, const ring::Prices& prices,
               const Options& options, std::ostream& out) {
  const Report layouts = layouts_report(planned, plan, prices, options);
  if (!options.json.empty()) {
    const std::string text = plan_json(plan, prices, planned.choice, layouts) + '\n';
    if (options.json == kNothing) {
      out << text;
      return;
    }
    as_option("--json " + options.json, [&] { files::TextFile(options.json).commit(text); });
  }
  print(planned, plan, prices, layouts, options, out);
}

}  // namespace

// One process plans for all ranks of --mesh.
ExitCode plan_command(const CommandContext& context) {
  if (!context.options.shape) {
    throw ArgumentError("--shape", "nothing", "B,T,S,N,K,D or B,T,S,N,K,D,Dv");
  }
  const Options options = with_ranks(context.options);
  if (!options.dtype && !planned_place(options).is_host()) {
    print_warnings(
        {"--dtype is not given, so float32 is planned; GPUs compute bfloat16 many times "
         "as fast (--dtype bfloat16)"});
  }
  const Registry registry = Registry::standard();
  if (options.recommend) {
    recommend(options, registry, context.out);
    return ExitCode::success;
  }
  if (options.scaling) {
    predict_scaling(options, registry, context.out);
    return ExitCode::success;
  }
  PlannedCase planned = lay_out_case(options, registry);
  if (options.simulate) check_simulated_ranks(planned.setup.mesh);
  settle_schedule(planned, options, registry);
  const ring::PlanInput input = planned.input();
  const ring::Plan plan =
      ring::make_plan(input, planned.choice.schedule, ring::simulated_ranks(input));
  print_warnings(planned.setup.warnings);
  print_warnings(warnings_of(planned, plan, options));
  if (options.simulate) {
    simulate_plan(planned, options, context.out);
  } else {
    show_plan(planned, plan, input.prices, options, context.out);
  }
  return ExitCode::success;
}

}  // namespace annulus::launcher
