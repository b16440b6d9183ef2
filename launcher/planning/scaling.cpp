#include "launcher/planning/scaling.hpp"

#include <algorithm>
#include <optional>
#include <ostream>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "launcher/planning/planned_case.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

ScalingPoint predict_point(const Options& options, const Registry& registry, int ranks, bool weak) {
  Options asked = on_mesh(options, fmt::format("{}={}", options.sequence_axis, ranks));
  asked.shape = scaled_shape(options, ranks, options.ranks, weak);
  PlannedCase planned = lay_out_case(asked, registry);
  settle_schedule(planned, asked, registry);
  ScalingPoint point;
  point.weak = weak;
  point.ranks = ranks;
  point.nodes = planned.node_of_rank.empty() ? 1 : planned.node_of_rank.back() + 1;
  point.shape = *asked.shape;
  point.schedule = ring::name_of(planned.choice.schedule);
  point.transport = planned.model.transport;
  const ring::PlanInput input = planned.input();
  point.seconds = ring::predict_run(input, planned.choice).seconds;
  point.flops = forward_flops(*asked.shape, visible_pairs(planned.setup.problem));
  return point;
}

}  // namespace

std::vector<int> scaling_ranks(int most, int ranks_per_node) {
  const int node = ranks_per_node > 0 ? std::min(ranks_per_node, most) : most;
  std::vector<int> all;
  for (int ranks = 1; ranks < node; ranks *= 2) all.push_back(ranks);
  for (int ranks = node; ranks < most; ranks *= 2) all.push_back(ranks);
  all.push_back(most);
  return all;
}

AttentionShape scaled_shape(const Options& options, int ranks, int most_ranks, bool weak) {
  AttentionShape shape = *options.shape;
  if (!weak || shape.kv_length == 0) return shape;
  const std::int64_t keys = options.tokens_per_rank > 0
                                ? options.tokens_per_rank
                                : std::max<std::int64_t>(1, shape.kv_length / most_ranks);
  if (shape.query_length > 1) {  // a decoding step keeps its one query
    shape.query_length =
        std::max<std::int64_t>(1, keys * ranks * shape.query_length / shape.kv_length);
  }
  shape.kv_length = keys * ranks;
  return shape;
}

void set_efficiencies(std::vector<ScalingPoint>& points) {
  for (ScalingPoint& point : points) {
    const auto first = std::find_if(points.begin(), points.end(), [&](const ScalingPoint& other) {
      return other.weak == point.weak;
    });
    const std::optional<double> rate = point.rate_per_rank();
    const std::optional<double> of_first = first->rate_per_rank();
    if (rate && of_first && *of_first > 0) point.efficiency = *rate / *of_first;
  }
}

AttentionProblem scaled_problem(const Options& options) {
  return set_up_problem(on_mesh(options, fmt::format("{}=1", options.sequence_axis)),
                        *options.shape, options.dtype.value_or(DType::float32), /*ranks=*/0)
      .problem;
}

Report make_scaling_report(const char* command, const char* time_unit, const Options& options,
                           const std::string& problem, Record record) {
  Report report(command, std::move(record),
                {{"scaling", "", 8, 0, "strong: one problem; weak: the sequence grows with ranks"},
                 {"ranks", "", 6},
                 {"nodes", "", 6},
                 {"T", "", 10, 0, "query length"},
                 {"S", "", 10, 0, "key/value length"},
                 {"schedule", "", 11},
                 {"time", time_unit, 10, 0, "of the slowest rank"},
                 {"rate", "TFLOP/s/rank", 0, 0, "2 N (D + Dv) operations per visible pair"},
                 {"efficiency", "%", 0, 0, "rate per rank, over that of one rank"}},
                {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("problem", problem);
  return report;
}

Row scaling_row(const ScalingPoint& point) {
  return {
      point.weak ? "weak" : "strong",
      std::to_string(point.ranks),
      std::to_string(point.nodes),
      std::to_string(point.shape.query_length),
      std::to_string(point.shape.kv_length),
      point.schedule,
      point.transport.empty() ? milliseconds_cell(point.seconds) : predicted_cell(point.seconds),
      cell_of(point.rate_per_rank(), [](double r) { return fmt::format("{:.4g}", r * 1e-12); }),
      percent_cell(point.efficiency)};
}

void predict_scaling(const Options& options, const Registry& registry, std::ostream& out) {
  if (options.ranks == 0) throw ArgumentError("--ranks", "nothing", "the largest number of ranks");
  const AttentionProblem scaled = scaled_problem(options);
  const std::string problem = problem_text(scaled);
  Report report = make_scaling_report("plan.scaling", "ms, predicted", options, problem,
                                      planned_record(options, scaled));
  add_assumed_device(report, options);
  ReportFiles files(options.json, options.csv, report);
  // Refuses ranks that do not fill their nodes before the work.
  static_cast<void>(planned_nodes(options, MeshShape({{options.sequence_axis, options.ranks}})));
  const ring::CostModel model = cost_model_of(options, planned_place(options));
  std::set<std::string> transports;
  std::vector<ScalingPoint> points;
  for (const bool weak : {false, true}) {
    for (const int ranks : scaling_ranks(options.ranks, options.ranks_per_node)) {
      points.push_back(predict_point(options, registry, ranks, weak));
      transports.insert(points.back().transport);
    }
  }
  report.add_meta("predicted by", predictor_text(model, transports, points.back().nodes > 1));
  set_efficiencies(points);
  for (const ScalingPoint& point : points) report.add_row(scaling_row(point));
  if (!files.replace_table()) report.write_table(out);
  files.write(report, out);
}

}  // namespace annulus::launcher
