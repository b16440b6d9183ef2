#include "launcher/bench/bench_report.hpp"

#include <string>

#include <fmt/format.h>

#include <annulus/verification/sampled_rows.hpp>

#include "launcher/report/cells.hpp"
#include "launcher/report/record.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;

}  // namespace

Report make_bench_report(const CommandContext& context, const Mesh& mesh, Place place,
                         int threads) {
  const Options& options = context.options;
  const std::string rate = "GFLOP/s/rank";
  Report report(
      "bench", make_record(context, mesh, place, threads),
      {{"shape", kShapeUnit, 18},
       {"mask", "", 0, 9},
       {"dtype", "", 8, 6},
       {"mesh", "", 0, 8},
       {"schedule", "", 9},
       {"layout", "", 0, 4},
       {"impl", "", 6},
       {"transport", "", 0, 4},
       {"time", "ms, median", 8, 0,
        fmt::format("of {} after {} to warm up; a call takes as long as its slowest rank",
                    counted(options.iterations, "call"), options.warmup)},
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
       {"verdict", "", 7}},
      {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("mesh", mesh_text(mesh, threads, place));
  add_rank_order(report, context.session);
  return report;
}

void add_bench_row(Report& report, const ProblemSetup& setup, const Attention& attention,
                   const BenchMeasurement& measured, int ranks) {
  const auto rate = [&](double seconds) {
    return seconds > 0 ? fmt::format("{:.2f}", measured.flops / seconds / ranks * 1e-9) : kNothing;
  };
  const double of_local = measured.local / measured.time.median;
  report.add_row({shape_cell(setup.problem.shape),
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
                  fmt::format("{:.1f}", of_local * 100),
                  fmt::format("{:.3f}", measured.bytes / kMiB),
                  milliseconds_cell(measured.exposed),
                  measured.hidden ? fmt::format("{:.1f}", *measured.hidden * 100) : kNothing,
                  fmt::format("{:.1f}", measured.bookkeeping * 100),
                  fmt::format("{:.1f}", measured.peak_memory / kMiB),
                  fmt::format("{:.1f}", measured.extra_memory / kMiB),
                  fmt::format("{:.2e}", measured.accuracy.output),
                  measured.accuracy.within(measured.bound) ? "OK" : "FAILED"});
}

}  // namespace annulus::launcher
