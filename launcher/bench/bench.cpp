#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/device.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/for_tensor.hpp>
#include <annulus/verification/gradient_shards.hpp>
#include <annulus/verification/sampled_rows.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/bench/bench_report.hpp"
#include "launcher/bench/timing.hpp"
#include "launcher/commands/commands.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/operations.hpp"
#include "launcher/report/progress.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/trace_file.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/hints.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// Traced calls on a device, made after the timed ones.
constexpr int kTracedCalls = 3;

// Traced calls of one case, which get a row of their own.
void name_case(TraceOfRanks& ranks, const std::string& name) {
  for (std::vector<TraceSpan>& spans : ranks) {
    if (spans.empty()) continue;
    TraceSpan whole{{TraceCategory::other, name}, "case", spans[0].begin_ns, spans[0].end_ns};
    for (const TraceSpan& span : spans) {
      whole.begin_ns = std::min(whole.begin_ns, span.begin_ns);
      whole.end_ns = std::max(whole.end_ns, span.end_ns);
    }
    spans.push_back(whole);
  }
}

class Bench {
 public:
  Bench(const CommandContext& context, Context& ranks, Report& report)
      : options_(context.options),
        ranks_(ranks),
        mesh_(ranks.mesh()),
        device_(ranks.device()),
        report_(report),
        progress_(ranks.rank() == 0 ? progress_terminal() : files::FileDescriptor()),
        rest_(device_.place()) {
    tracer_.add_sink(collector_);
  }

  /// Collective. Measures one shape and adds its row.
  void run(const AttentionShape& shape) {
    Control& world = mesh_.world();
    ProblemSetup setup =
        settled_problem(options_, shape, options_.dtype.value_or(DType::float32), ranks_);
    const AttentionProblem& problem = setup.problem;
    if (cases_ == 0 && mesh_.rank() == 0) print_warnings(setup.warnings);
    // Three series, the first call and the oracle; with the backward pass, four more series and its
    // first call. The few traced calls do not count.
    const int series_of_calls = options_.once ? 0 : options_.warmup + options_.iterations;
    const int backward = wants_backward() ? 4 * series_of_calls + 1 : 0;
    const bool compares = problem.in_global_order() && !options_.once;
    const int unrestricted = compares ? (wants_backward() ? 2 : 1) * series_of_calls : 0;
    progress_.begin(shape_cell(shape), 3 * series_of_calls + 2 + backward + unrestricted);
    device_.memory().trim();
    device_.memory().reset_peak();
    MemoryPool& host = device_.staging();
    tracer_.pause(false);
    setup.problem.tracer = &tracer_;
    Attention attention(ranks_, setup.problem);
    if (wants_backward()) attention.prepare_backward();  // so that errors show early
    const ring::ShardedOperands& operands = attention.operands();
    log_choices(problem, attention, mesh_);
    progress_.aside([&] {
      print_warnings(attention.decision().warnings);
      if (cases_ == 0 && mesh_.rank() == 0) print_warnings(unused_options(attention));
    });
    if (attention.decision().by == ring::DecidedBy::measurement) device_.memory().reset_peak();
    const verification::CaseShards shards = collectively(world, [&] {
      const Computing computing = world.computing();
      return verification::for_tensor("--shape " + shape_cell(shape), [&] {
        return verification::CaseShards(operands, problem.dtype, options_.seed, mesh_.rank(), host,
                                        ranks_.threads(), setup.fills, problem.normalize_output);
      });
    });
    verification::DeviceTensors moved = collectively(world, [&] {
      return verification::DeviceTensors(shards.local_tensors(), device_, mesh_.watchdog());
    });
    moved.upload();

    BenchMeasurement measured;
    const auto call = [&] {
      attention.run_and_wait(moved.tensors());
      progress_.advance(1);
    };
    tracer_.pause(traces_apart());
    collector_.clear();
    const Timing first = time_calls(1, world, call);
    measured.peak_memory = static_cast<double>(device_.memory().statistics().peak_in_use);
    rest_ = Rest(device_.place());
    std::vector<TraceSpan> spans = measure(
        measured, first, call, [&] { attention.forward_pass().run_kernels(moved.tensors()); });
    if (!options_.once) attention.run_and_wait(moved.tensors());  // the kernels alone spoil results
    account(measured, summarize(spans), attention.rank_plan(), attention.extra_bytes());
    measured.flops = forward_flops(shape, visible_pairs(problem));

    if (wants_backward()) {
      measured.backward = measure_backward(problem, attention, moved.tensors(), spans);
    }
    moved.download();
    const verification::Deviation deviation = collectively(world, [&] {
      const Computing computing = world.computing();
      return verification::sampled_deviation(problem, operands, shards, options_.seed, mesh_.rank(),
                                             ranks_.threads());
    });
    measured.accuracy = accuracy(deviation, world);
    measured.implementations = attention.implementations_of_ranks();
    measured.bound = accuracy_bound(problem);
    if (compares) {
      tracer_.pause(true);
      measure_unrestricted(setup.problem, moved.tensors(), measured);
    }

    progress_.aside([&] {
      if (options_.explain) {
        report_.add_meta("layout chosen", why_layout_text(setup));
        explain(attention, wants_backward() ? attention.backward_pass() : nullptr, report_);
      }
      if (cases_ == 0 && wants_backward()) add_rounding(*attention.backward_pass(), report_);
      add_bench_row(report_, setup, attention, measured, mesh_.size());
    });
    keep_trace(spans, shape_cell(shape));
    ++cases_;
    if (!measured.accuracy.within(measured.bound)) ++failed_;
  }

  /// Stops showing progress.
  void end_progress() { progress_.end(); }
  /// The trace of all cases, on rank 0, if --trace was given.
  [[nodiscard]] const TraceOfRanks& trace() const { return trace_; }

  [[nodiscard]] bool passed() const { return failed_ == 0; }
  [[nodiscard]] std::string verdict() const {
    return fmt::format("{} ({} of {} within bounds)", passed() ? "OK" : "FAILED", cases_ - failed_,
                       cases_);
  }

 private:
  [[nodiscard]] std::vector<std::string> unused_options(const Attention& attention) const {
    if (!wants_backward()) return hints_of_choice(options_, {attention.schedule().schedule});
    const ring::ShardedAttention& backward = *attention.backward_pass();
    return hints_of_choice(options_, {attention.schedule().schedule, backward.schedule().schedule},
                           backward.adds_rounded_gradients());
  }

  [[nodiscard]] bool wants_backward() const { return options_.backward.value_or(false); }

  // Tracing would keep a device from replaying, so series of its calls are not traced.
  [[nodiscard]] bool traces_apart() const { return !device_.place().is_host() && !options_.once; }

  // Sets the times of a pass. With --once, the time is `first`, that of the first call, which has
  // been made. Otherwise it times a series of calls, and the kernels alone before and after it,
  // each time for as many calls. Returns the trace of calls. Collective, as are the next four.
  template <class Call, class RunKernels>
  std::vector<TraceSpan> measure(PassMeasurement& measured, const Timing& first, const Call& call,
                                 const RunKernels& run_kernels) {
    if (options_.once) {
      measured.time = first;
      return collector_.spans();
    }
    const auto run_alone = [&] {
      run_kernels();
      progress_.advance(1);
    };
    const Timing before = time_series(run_alone);
    measured.time = time_series(call);
    std::vector<TraceSpan> spans = collector_.spans();
    measured.local = (before.median + time_series(run_alone).median) / 2;
    return traces_apart() ? trace_calls(call) : spans;
  }

  // Times calls after warming up.
  template <class Body>
  Timing time_series(const Body& body) {
    return rest_.before([&] {
      for (int i = 0; i < options_.warmup; ++i) body();
      for (double warm = 0; warm < options_.warm_seconds;) warm += seconds_of(mesh_.world(), body);
      collector_.clear();
      return time_calls(options_.iterations, mesh_.world(), body);
    });
  }

  // On a device, traces calls that are not timed.
  template <class Body>
  std::vector<TraceSpan> trace_calls(const Body& call) {
    collector_.clear();
    tracer_.pause(false);
    static_cast<void>(time_calls(traced_calls(), mesh_.world(), call));
    tracer_.pause(true);
    return collector_.spans();
  }
  [[nodiscard]] int traced_calls() const {
    if (options_.once) return 1;
    return device_.place().is_host() ? options_.iterations
                                     : std::min(kTracedCalls, options_.iterations);
  }

  // Times the backward pass on the results of the forward pass, and adds its trace to the forward
  // pass's.
  BackwardMeasurement measure_backward(const AttentionProblem& problem, Attention& attention,
                                       const ring::LocalTensors& forward,
                                       std::vector<TraceSpan>& trace) {
    verification::GradientShards shards(attention.operands(), problem, {}, options_.seed, ranks_);
    shards.upload();
    const ring::BackwardLocalTensors tensors = shards.tensors(forward);
    const auto call = [&] {
      attention.backward_and_wait(tensors);
      progress_.advance(1);
    };
    collector_.clear();
    const Timing first = time_calls(1, mesh_.world(), call);
    BackwardMeasurement measured;
    measured.peak_memory = static_cast<double>(device_.memory().statistics().peak_in_use);
    ring::ShardedAttention& pass = *attention.backward_pass();
    const std::vector<TraceSpan> spans =
        measure(measured, first, call, [&] { pass.run_kernels(tensors); });
    account(measured, summarize(spans), pass.rank_plan(), pass.extra_bytes());
    trace.insert(trace.end(), spans.begin(), spans.end());
    if (!options_.once) {
      // The host waits once for both.
      measured.both = time_series([&] {
        attention.run(forward);
        attention.backward(tensors);
        attention.wait();
        progress_.advance(1);
      });
    }
    measured.flops = backward_flops(problem.shape, visible_pairs(problem));
    measured.schedule = pass.schedule();
    measured.adds_rounded = pass.adds_rounded_gradients();
    measured.implementations = pass.implementations_of_ranks();
    return measured;
  }

  // Collective. Times the same calls as `auto` plans them if bits may depend on the number of
  // ranks.
  void measure_unrestricted(AttentionOptions options, const ring::LocalTensors& forward,
                            BenchMeasurement& measured) {
    options.reproducible.reset();
    options.schedule = options.backward.schedule = "auto";
    Attention attention(ranks_, options);
    const auto median_of = [&](const auto& call) {
      return time_series([&] {
               call();
               progress_.advance(1);
             })
          .median;
    };
    measured.unrestricted = median_of([&] { attention.run_and_wait(forward); });
    if (!measured.backward) return;
    verification::GradientShards shards(attention.operands(), options, {}, options_.seed, ranks_);
    shards.upload();
    const ring::BackwardLocalTensors tensors = shards.tensors(forward);
    measured.backward->unrestricted = median_of([&] { attention.backward_and_wait(tensors); });
  }

  // Merges the events that the ranks recorded in the traced calls.
  void account(PassMeasurement& measured, const TraceSummary& summary, const ring::RankPlan& plan,
               std::size_t extra_bytes) {
    const auto call = static_cast<double>(summary.call);
    const std::vector<double> most = mesh_.world().max(
        std::array{static_cast<double>(plan.bytes_received()),
                   static_cast<double>(summary.wait) * 1e-9 / traced_calls(),
                   call > 0 ? static_cast<double>(summary.bookkeeping()) / call : 0.0,
                   measured.peak_memory, static_cast<double>(extra_bytes)},
        "times of the calls");
    const std::vector<double> total =
        mesh_.world().sum(std::array{static_cast<double>(summary.transfer),
                                     static_cast<double>(summary.transfer_under_kernel)},
                          "times of the transfers");
    measured.bytes = most[0];
    measured.exposed = most[1];
    measured.bookkeeping = most[2];
    measured.peak_memory = most[3];
    measured.extra_memory = most[4];
    if (total[0] > 0) measured.hidden = total[1] / total[0];
  }

  // Collective.
  void keep_trace(const std::vector<TraceSpan>& spans, const std::string& name) {
    if (options_.trace.empty()) return;
    TraceOfRanks ranks = gather_trace(spans, mesh_);
    name_case(ranks, name);
    trace_.resize(ranks.size());
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      trace_[rank].insert(trace_[rank].end(), ranks[rank].begin(), ranks[rank].end());
    }
  }

  const Options& options_;
  Context& ranks_;
  Mesh& mesh_;
  Device& device_;
  Report& report_;
  Progress progress_;
  TraceCollector collector_;  // of the present case
  Tracer tracer_;
  Rest rest_;  // so that each series begins with a rested GPU
  TraceOfRanks trace_;
  int cases_ = 0;
  int failed_ = 0;
};

// The given shape, or one of each length of the sweep (with the other sizes from --shape, or from a
// typical model).
std::vector<AttentionShape> shapes_of(const Options& options) {
  if (!options.sequence_sweep) {
    if (options.shape) return {*options.shape};
    throw ArgumentError("--shape", "nothing",
                        "B,T,S,N,K,D or B,T,S,N,K,D,Dv (or --sweep BEGIN:END[:FACTOR])");
  }
  const AttentionShape defaults{1, 0, 0, 8, 8, 64, 64};
  std::vector<AttentionShape> shapes;
  const SweepRange& sweep = *options.sequence_sweep;
  for (std::int64_t length = sweep.begin; length <= sweep.end; length *= sweep.factor) {
    AttentionShape shape = options.shape.value_or(defaults);
    shape.query_length = shape.kv_length = length;
    shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace

ExitCode bench_command(const CommandContext& context) {
  const Options& options = context.options;
  if (options.scaling) return bench_scaling(context);
  if (options.hops) return bench_hops(context);
  if (!options.calibrate.empty()) return calibrate(context);
  // Depends on the options alone, which are the same on every rank.
  const std::vector<AttentionShape> shapes = shapes_of(options);
  const std::unique_ptr<Context> ranks = open_context(context);
  Mesh& mesh = ranks->mesh();
  Report report = make_bench_report(context, mesh, ranks->place(), ranks->threads());
  std::optional<ReportFiles> files;
  collectively(mesh.world(), [&] {
    if (mesh.rank() == 0) files.emplace(options.json, options.csv, report);
  });
  std::optional<TraceFile> trace;
  if (!options.trace.empty()) trace.emplace(options.trace, mesh.world());
  if (files && !files->replace_table()) {
    report.follow(context.out, typical_bench_row(report, shapes, ranks->place()));
  }
  Bench bench(context, *ranks, report);
  for (const AttentionShape& shape : shapes) {
    begin_step("annulus bench was timing " + to_string(shape));
    bench.run(shape);
    // Rows so far survive an interruption, or an error of a later case.
    collectively(mesh.world(), [&] {
      if (files) files->keep(report, context.out);
    });
  }
  bench.end_progress();
  report.set_verdict(bench.verdict(), bench.passed());
  if (trace) trace->commit(bench.trace(), report);
  collectively(mesh.world(), [&] {
    if (files) files->write(report, context.out);
  });
  return bench.passed() ? ExitCode::success : ExitCode::wrong_numbers;
}

}  // namespace annulus::launcher
