#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/device.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/sampled_rows.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/bench/bench_hops.hpp"
#include "launcher/bench/bench_local.hpp"
#include "launcher/bench/calibration.hpp"
#include "launcher/bench/timing.hpp"
#include "launcher/commands/commands.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/open_device.hpp"
#include "launcher/setup/problem_setup.hpp"
#include "launcher/setup/threads.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;
// Calls of a device that are traced, after those that are timed.
constexpr int kTracedCalls = 3;
// How long a GPU rests before it is timed: as long as it has worked, within these.
constexpr std::chrono::milliseconds kLeastRest{300};
constexpr std::chrono::milliseconds kMostRest{3000};

double visible_pairs(const AttentionProblem& problem) {
  const AttentionShape& s = problem.shape;
  return static_cast<double>(problem.mask
                                 .examine(0, s.batch, {GlobalPosition(0), s.query_length, 1},
                                          {GlobalPosition(0), s.kv_length, 1})
                                 .pairs);
}

// What was measured of one case, over all ranks; the same on every rank.
struct Measurement {
  Timing time;
  double local = 0;              // seconds of the kernels alone, median
  double flops = 0;              // of the whole problem
  double bytes = 0;              // received by the rank that receives most
  double exposed = 0;            // seconds per call, of the rank that waits longest
  std::optional<double> hidden;  // part of the transfer time under kernels
  double bookkeeping = 0;        // largest part of a rank's time
  double peak_memory = 0;        // bytes, of the rank with most
  double extra_memory = 0;       // likewise
  verification::Accuracy accuracy;
  AccuracyBound bound;
};

Report make_report(const Options& options, Mesh& mesh, const Device& device, int threads) {
  const std::string rate = device.place().is_host() ? "GFLOP/s/rank" : "TFLOP/s/rank";
  Report report("bench", {{"shape", "B,T,S,N,K,D,Dv", 24},
                          {"dtype", "", 8},
                          {"schedule", "", 9},
                          {"layout", "", 10},
                          {"impl", "", 8},
                          {"transport", "", 9},
                          {"time", "ms, median", 10},
                          {"least", "ms", 10},
                          {"p99", "ms", 10},
                          {"rate", rate, 12},
                          {"local", rate, 12},
                          {"of local", "%", 8},
                          {"moved", "MiB/rank", 9},
                          {"wait", "ms", 8},
                          {"hidden", "%", 6},
                          {"bookkeeping", "%", 11},
                          {"memory", "MiB/rank", 9},
                          {"extra", "MiB/rank", 9},
                          {"error", "", 8},
                          {"verdict", "", 7}});
  report.add_meta("options", options.given);
  report.add_meta(
      "mesh", fmt::format("{}: {} on {}, {} per rank", to_string(mesh.shape()),
                          counted(mesh.size(), "rank"), counted(mesh.topology().nodes(), "node"),
                          counted(threads, "thread")));
  report.add_meta("calls", fmt::format("{} timed after {} to warm up; a call takes as long as its "
                                       "slowest rank",
                                       options.iterations, options.warmup));
  report.add_meta("rate", "2 N (D + Dv) operations per visible pair, over time and ranks");
  report.add_meta(
      "local",
      "rate of the same blocks by the same kernel, without hops and merges, timed before and "
      "after" +
          std::string(device.place().is_host() ? "" : ", replayed"));
  report.add_meta("wait", "for transfers, with nothing to compute; of the rank that waits longest");
  report.add_meta("hidden", "part of the transfer time that passed under kernels");
  report.add_meta("memory",
                  "most that was taken from the rank's memory pool, shards included, but not "
                  "what a transport keeps for transfers");
  report.add_meta("extra", "beyond inputs and outputs: buffers of transfers, partial results");
  report.add_meta("error", fmt::format("relative Frobenius, against a float64 oracle, of up to {} "
                                       "rows of each rank",
                                       verification::kSampledRows));
  return report;
}

void add_row(Report& report, const ProblemSetup& setup, const ring::ShardedAttention& attention,
             const Measurement& measured, const Device& device, int ranks) {
  const AttentionShape& s = setup.problem.shape;
  const auto milliseconds = [](double seconds) { return fmt::format("{:.3f}", seconds * 1e3); };
  const auto rate = [&](double seconds) {
    const double unit = device.place().is_host() ? 1e-9 : 1e-12;
    return seconds > 0 ? fmt::format("{:.2f}", measured.flops / seconds / ranks * unit) : "-";
  };
  const double of_local = measured.local / measured.time.median;
  report.add_row({fmt::format("{},{},{},{},{},{},{}", s.batch, s.query_length, s.kv_length, s.heads,
                              s.kv_heads, s.head_dim, s.value_dim),
                  std::string(annulus::name_of(setup.problem.dtype)),
                  std::string(ring::name_of(attention.schedule().schedule)),
                  std::string(annulus::name_of(setup.layout.sequence)),
                  attention.implementations(),
                  attention.transport(),
                  milliseconds(measured.time.median),
                  milliseconds(measured.time.least),
                  milliseconds(measured.time.p99),
                  rate(measured.time.median),
                  rate(measured.local),
                  fmt::format("{:.1f}", of_local * 100),
                  fmt::format("{:.3f}", measured.bytes / kMiB),
                  milliseconds(measured.exposed),
                  measured.hidden ? fmt::format("{:.1f}", *measured.hidden * 100) : "-",
                  fmt::format("{:.1f}", measured.bookkeeping * 100),
                  fmt::format("{:.1f}", measured.peak_memory / kMiB),
                  fmt::format("{:.1f}", measured.extra_memory / kMiB),
                  fmt::format("{:.2e}", measured.accuracy.output),
                  measured.accuracy.within(measured.bound) ? "OK" : "FAILED"});
}

class Bench {
 public:
  Bench(const CommandContext& context, Mesh& mesh, Device& device, int threads, Report& report)
      : options_(context.options),
        mesh_(mesh),
        device_(device),
        threads_(threads),
        report_(report) {}

  /// Collective. Measures one shape and adds its row.
  void run(const AttentionShape& shape) {
    Control& world = mesh_.world();
    const ProblemSetup setup = collectively(world, [&] {
      return set_up_problem(options_, shape, options_.dtype.value_or(DType::float32), mesh_.size());
    });
    const AttentionProblem& problem = setup.problem;
    const ring::ShardedOperands operands =
        collectively(world, [&] { return shard_operands(setup); });
    collectively(world,
                 [&] { check_choices(options_, problem, operands, registry_, device_.place()); });
    if (cases_ == 0 && mesh_.rank() == 0) print_warnings(setup.warnings);
    device_.memory().trim();
    device_.memory().reset_peak();
    MemoryPool& host = device_.staging();
    TraceCollector collector;
    Tracer tracer;
    tracer.add_sink(collector);
    ring::ShardedAttentionOptions attention_options;
    attention_options.implementation = options_.implementation;
    attention_options.schedule = options_.schedule;
    attention_options.runner = {threads_, &tracer};
    attention_options.cost_model =
        collectively(world, [&] { return cost_model_of(options_, device_.place()); });
    attention_options.transport = options_.transport;
    ring::ShardedAttention attention(problem, operands, mesh_, registry_, device_,
                                     attention_options);
    const verification::CaseShards shards = collectively(world, [&] {
      return verification::CaseShards(operands, problem.dtype, options_.seed, mesh_.rank(), host,
                                      threads_);
    });
    verification::DeviceTensors moved = collectively(world, [&] {
      return verification::DeviceTensors(shards.local_tensors(), device_, mesh_.watchdog());
    });
    moved.upload();

    Measurement measured;
    const auto call = [&] { attention.run(moved.tensors()); };
    // Tracing would keep a device from replaying: what its time goes to is seen in calls apart.
    const bool apart = !device_.place().is_host();
    tracer.pause(apart);
    call();
    measured.peak_memory = static_cast<double>(device_.memory().statistics().peak_in_use);
    LocalBlocks local = collectively(world, [&] {
      return LocalBlocks(problem, attention, moved.tensors(), device_, mesh_.watchdog(), threads_);
    });
    // A GPU that has worked for a while runs slower, and rest does not undo all of it. So each
    // series begins rested, and the kernels alone are timed before and after, each time as long.
    std::chrono::nanoseconds worked{0};
    const auto timed = [&](const auto& body) {
      if (apart) std::this_thread::sleep_for(std::clamp(worked, {kLeastRest}, {kMostRest}));
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < options_.warmup; ++i) body();
      collector.clear();
      const Timing timing = time_calls(options_.iterations, world, body);
      worked = std::chrono::steady_clock::now() - begin;
      return timing;
    };
    const auto run_alone = [&] { local.run(); };
    const Timing before = timed(run_alone);
    measured.time = timed(call);
    const TraceSummary steady = summarize(collector.spans());
    measured.local = (before.median + timed(run_alone).median) / 2;
    int traced = options_.iterations;
    if (apart) {
      tracer.pause(false);
      traced = std::min(kTracedCalls, options_.iterations);
      static_cast<void>(time_calls(traced, world, call));
      tracer.pause(true);
    }
    account(measured, apart ? summarize(collector.spans()) : steady, attention, traced);
    measured.flops = forward_flops(shape, visible_pairs(problem));

    moved.download();
    const verification::Deviation deviation = collectively(world, [&] {
      const Computing computing = world.computing();
      return verification::sampled_deviation(problem, operands, shards, options_.seed, mesh_.rank(),
                                             threads_);
    });
    measured.accuracy = accuracy(deviation, world);
    measured.bound = accuracy_bound(problem.dtype, shape.kv_length);

    if (options_.explain) {
      explain(attention.selection(), report_);
      explain(attention.schedule(), report_);
    }
    add_row(report_, setup, attention, measured, device_, mesh_.size());
    ++cases_;
    if (!measured.accuracy.within(measured.bound)) ++failed_;
  }

  [[nodiscard]] bool passed() const { return failed_ == 0; }
  [[nodiscard]] std::string verdict() const {
    return fmt::format("{} ({} of {} within bounds)", passed() ? "OK" : "FAILED", cases_ - failed_,
                       cases_);
  }

 private:
  // Brings together what the ranks saw of the traced calls.
  void account(Measurement& measured, const TraceSummary& summary,
               const ring::ShardedAttention& attention, int calls) {
    const auto call = static_cast<double>(summary.call);
    const std::vector<double> most = mesh_.world().max(
        std::array{static_cast<double>(attention.rank_plan().bytes_received()),
                   static_cast<double>(summary.wait) * 1e-9 / calls,
                   call > 0 ? static_cast<double>(summary.bookkeeping()) / call : 0.0,
                   measured.peak_memory, static_cast<double>(attention.extra_bytes())});
    const std::vector<double> total = mesh_.world().sum(std::array{
        static_cast<double>(summary.transfer), static_cast<double>(summary.transfer_under_kernel)});
    measured.bytes = most[0];
    measured.exposed = most[1];
    measured.bookkeeping = most[2];
    measured.peak_memory = most[3];
    measured.extra_memory = most[4];
    if (total[0] > 0) measured.hidden = total[1] / total[0];
  }

  const Options& options_;
  Mesh& mesh_;
  Device& device_;
  int threads_;
  Report& report_;
  Registry registry_ = Registry::standard();
  int cases_ = 0;
  int failed_ = 0;
};

// The given shape, or one of each length of the sweep (with the sizes that --shape gives, or a
// usual model's).
std::vector<AttentionShape> shapes_of(const Options& options) {
  if (!options.sequence_sweep) {
    if (options.shape) return {*options.shape};
    throw ArgumentError("--shape", "nothing",
                        "B,T,S,N,K,D or B,T,S,N,K,D,Dv (or --sweep BEGIN:END[:FACTOR])");
  }
  const AttentionShape usual{1, 0, 0, 8, 8, 64, 64};
  std::vector<AttentionShape> shapes;
  const SweepRange& sweep = *options.sequence_sweep;
  for (std::int64_t length = sweep.begin; length <= sweep.end; length *= sweep.factor) {
    AttentionShape shape = options.shape.value_or(usual);
    shape.query_length = shape.kv_length = length;
    shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace

ExitCode bench_command(const CommandContext& context) {
  const Options& options = context.options;
  if (options.hops) return bench_hops(context);
  if (!options.calibrate.empty()) return calibrate(context);
  // Depends on the options alone, which are the same on every rank.
  const std::vector<AttentionShape> shapes = shapes_of(options);
  Mesh mesh(set_up_mesh(options, context.session.size()), context.session.world(),
            Watchdog(Watchdog::Seconds(options.timeout)));
  const int threads = threads_per_rank(options, mesh);
  std::optional<ReportFiles> files;
  collectively(mesh.world(), [&] {
    if (mesh.rank() == 0) files.emplace(options.json, options.csv);
  });

  const std::unique_ptr<Device> device = open_device(options, mesh);
  Report report = make_report(options, mesh, *device, threads);
  if (files && !files->replace_table()) report.follow(context.out);
  Bench bench(context, mesh, *device, threads, report);
  for (const AttentionShape& shape : shapes) bench.run(shape);
  report.set_verdict(bench.verdict(), bench.passed());
  collectively(mesh.world(), [&] {
    if (files) files->write(report, context.out);
  });
  return bench.passed() ? ExitCode::success : ExitCode::wrong_numbers;
}

}  // namespace annulus::launcher
