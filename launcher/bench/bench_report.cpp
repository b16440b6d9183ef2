#include "launcher/bench/bench_report.hpp"

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/verification/sampled_rows.hpp>

#include "launcher/report/cells.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/record.hpp"

namespace annulus::launcher {
namespace {

constexpr const char* kRateUnit = "GFLOP/s/rank";

// The columns of --backward.
std::vector<Column> backward_columns(const std::string& rate) {
  return {{"backward", "ms, median", 8, 0,
           "of backward passes, as time; verify --backward checks gradients"},
          {"backward rate", rate, 0, 0,
           "2 N (3 D + 2 Dv) operations per visible pair, divided by that time and ranks"},
          {"backward local", rate, 0, 2, "as local, of the blocks of the backward pass"},
          {"backward of local", "%", 0, 0, "backward rate divided by backward local"},
          {"both", "ms, median", 8, 0, "of a forward and a backward pass, one after the other"},
          {"both rate", rate, 0, 1, "operations of both, divided by that time and ranks"},
          {"backward schedule", "", 0, 3},
          {"backward impl", "", 0, 3},
          {"backward moved", "MiB/rank", 0, 5, "as moved"},
          {"backward wait", "ms", 0, 4, "as wait"},
          {"backward hidden", "%", 0, 5, "as hidden"},
          {"backward memory", "MiB/rank", 0, 5, "as memory, of both passes"},
          {"backward extra", "MiB/rank", 0, 4, "as extra, of the backward pass"}};
}

std::string rate_cell(double flops, double seconds, int ranks) {
  if (seconds <= 0) return kNothing;
  const double rate = flops / seconds / ranks * 1e-9;
  return rate < 1 ? fmt::format("{:.3g}", rate) : fmt::format("{:.2f}", rate);
}

std::string of_local_cell(const PassMeasurement& measured) {
  return measured.local == 0 ? kNothing : percent_cell(measured.local / measured.time.median);
}

// Cells for backward_columns().
Row backward_cells(const BenchMeasurement& measured, int ranks) {
  const BackwardMeasurement& backward = *measured.backward;
  const double both = backward.both ? backward.both->median : 0;
  return {milliseconds_cell(backward.time.median),
          rate_cell(backward.flops, backward.time.median, ranks),
          rate_cell(backward.flops, backward.local, ranks),
          of_local_cell(backward),
          backward.both ? milliseconds_cell(both) : kNothing,
          rate_cell(measured.flops + backward.flops, both, ranks),
          fmt::format("{}{}", ring::name_of(backward.schedule.schedule),
                      backward.adds_rounded ? ", sent in bfloat16" : ""),
          backward.implementations,
          mebibytes_cell(backward.bytes),
          milliseconds_cell(backward.exposed),
          percent_cell(backward.hidden),
          mebibytes_cell(backward.peak_memory, 1),
          mebibytes_cell(backward.extra_memory, 1)};
}

}  // namespace

Report make_bench_report(const CommandContext& context, const Mesh& mesh, Place place,
                         int threads) {
  const Options& options = context.options;
  const std::string rate = kRateUnit;
  std::vector<Column> columns{
      {"shape", kShapeUnit, 18},
      {"mask", "", 0, 9},
      {"dtype", "", 8, 6},
      {"mesh", "", 0, 8},
      {"schedule", "", 9},
      {"layout", "", 0, 4},
      {"impl", "", 6},
      {"transport", "", 0, 4},
      {"time", "ms, median", 8, 0,
       (options.once ? "of the first call"
                     : fmt::format("of {} after {} to warm up", counted(options.iterations, "call"),
                                   options.warmup)) +
           "; a call takes as long as its slowest rank"},
      {"least", "ms", 8, 7, "the fastest call"},
      {"p99", "ms", 8, 7, "the 99th percentile of calls"},
      {"rate", rate, 0, 0, "2 N (D + Dv) operations per visible pair, divided by time and ranks"},
      {"local", rate, 0, 2,
       "rate of the same blocks by the same kernel, without hops and merges, timed before and "
       "after" +
           std::string(place.is_host() ? "" : ", replayed")},
      {"of local", "%", 0, 0, "rate divided by local"},
      {"moved", "MiB/rank", 0, 5, "received by the rank that receives most"},
      {"wait", "ms", 7, 0,
       "for transfers, with nothing to compute; of the rank that waits longest"},
      {"hidden", "%", 0, 0,
       "share of transfer time (from post to completion) during which kernels ran"},
      {"bookkeeping", "%", 0, 6, "largest share of a rank's time that is neither kernel nor wait"},
      {"memory", "MiB/rank", 0, 5,
       "peak of the rank's memory pool, including shards but not what a transport keeps for "
       "transfers"},
      {"extra", "MiB/rank", 0, 3,
       "beyond inputs and outputs: buffers of transfers, partial results"},
      {"error", "", 8, 0,
       fmt::format("relative Frobenius, against a float64 oracle, of up to {} rows of each rank",
                   verification::kSampledRows)},
      {"verdict", "", 7}};
  if (options.backward.value_or(false)) {
    const std::vector<Column> added = backward_columns(rate);
    columns.insert(columns.end() - 1, added.begin(), added.end());
  }
  Report report("bench", make_record(context, mesh, place, threads), std::move(columns),
                {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("mesh", mesh_text(mesh, threads, place));
  add_rank_order(report, context.session);
  return report;
}

Row typical_bench_row(const Report& report, const std::vector<AttentionShape>& shapes,
                      Place place) {
  const std::vector<Column>& columns = report.columns();
  Row row(columns.size(), kNothing);
  for (std::size_t i = 0; i < columns.size(); ++i) {
    const std::string& name = columns[i].name;
    if (name == "shape") {
      for (const AttentionShape& shape : shapes) {
        if (shape_cell(shape).size() > row[i].size()) row[i] = shape_cell(shape);
      }
    } else if (name == "schedule") {
      row[i] = ring::name_of(ring::Schedule::double_ring);
    } else if (name == "impl") {
      row[i] = place.is_host() ? "native" : "flash_attn2";
    } else if (columns[i].unit == kRateUnit) {
      row[i] = place.is_host() ? "100.00" : "600000.00";  // the latter shows TFLOP/s
    } else if (columns[i].unit.starts_with("ms")) {
      row[i] = "1000.000";
    }
  }
  return row;
}

void add_bench_row(Report& report, const ProblemSetup& setup, const Attention& attention,
                   const BenchMeasurement& measured, int ranks) {
  const auto rate = [&](double seconds) { return rate_cell(measured.flops, seconds, ranks); };
  Row row{shape_cell(setup.problem.shape),
          mask_cell(setup.problem),
          std::string(annulus::name_of(setup.problem.dtype)),
          mesh_cell(setup.mesh),
          std::string(ring::name_of(attention.schedule().schedule)),
          ring::layout_text(setup.layout),
          measured.implementations,
          attention.transport(),
          milliseconds_cell(measured.time.median),
          milliseconds_cell(measured.time.least),
          milliseconds_cell(measured.time.p99),
          rate(measured.time.median),
          rate(measured.local),
          of_local_cell(measured),
          mebibytes_cell(measured.bytes),
          milliseconds_cell(measured.exposed),
          percent_cell(measured.hidden),
          percent_cell(measured.bookkeeping),
          mebibytes_cell(measured.peak_memory, 1),
          mebibytes_cell(measured.extra_memory, 1),
          fmt::format("{:.2e}", measured.accuracy.output)};
  if (measured.backward) {
    const Row cells = backward_cells(measured, ranks);
    row.insert(row.end(), cells.begin(), cells.end());
  }
  row.push_back(measured.accuracy.within(measured.bound) ? "OK" : "FAILED");
  report.add_row(std::move(row));
  const auto add_price = [&](const ring::ScheduleChoice& choice, const char* pass,
                             const PassMeasurement& of) {
    if (!of.unrestricted) return;
    add_price_of_order(choice, fmt::format("{}, {}", shape_cell(setup.problem.shape), pass), report,
                       MeasuredPrice{of.time.median, *of.unrestricted});
  };
  add_price(attention.schedule(), "forward", measured);
  if (measured.backward) add_price(measured.backward->schedule, "backward", *measured.backward);
}

}  // namespace annulus::launcher
