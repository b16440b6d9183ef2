#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/bytes.hpp>
#include <annulus/core/device.hpp>
#include <annulus/core/log.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/attention_weights.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/sharded_attention.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/filled_part.hpp>
#include <annulus/verification/for_tensor.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/options/as_option.hpp"
#include "launcher/options/file_names.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/operations.hpp"
#include "launcher/report/progress.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/trace_file.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/gradient_files.hpp"
#include "launcher/setup/hints.hpp"
#include "launcher/setup/input_tensors.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"
#include "launcher/setup/result_files.hpp"
#include "launcher/setup/same_on_ranks.hpp"

namespace annulus::launcher {
namespace {

/// The measurements of the median call of --repeat, over all ranks; the same on every rank.
struct Measurement {
  double seconds = 0;          ///< of the slowest rank
  double least_seconds = 0;    ///< of the fastest call of --repeat
  double most_seconds = 0;     ///< of the slowest
  double exposed_seconds = 0;  ///< longest wait of a rank for transfers
  double bookkeeping = 0;      ///< largest share of a rank's time that was neither kernel nor wait
  double flops = 0;            ///< of the problem, each visible pair counted once
  double bytes = 0;            ///< received by all ranks
  double peak_memory = 0;      ///< bytes, of the rank with most

  /// GFLOP/s.
  [[nodiscard]] double gflops() const { return seconds > 0 ? flops / seconds * 1e-9 : 0; }
};

Measurement measure(const TraceSummary& summary, const ring::RankPlan& plan, double flops,
                    const MemoryStatistics& memory, Mesh& mesh) {
  const auto call = static_cast<double>(summary.call);
  const std::vector<double> most = mesh.world().max(
      std::array{call, static_cast<double>(summary.wait),
                 call > 0 ? static_cast<double>(summary.bookkeeping()) / call : 0.0,
                 static_cast<double>(memory.peak_in_use)},
      "times of the call");
  const double bytes =
      mesh.world().sum(std::array{static_cast<double>(plan.bytes_received())}, "received bytes")[0];
  return {.seconds = most[0] * 1e-9,
          .least_seconds = most[0] * 1e-9,
          .most_seconds = most[0] * 1e-9,
          .exposed_seconds = most[1] * 1e-9,
          .bookkeeping = most[2],
          .flops = flops,
          .bytes = bytes,
          .peak_memory = most[3]};
}

// The call with the median time, and the times of the fastest and the slowest.
Measurement median_of(std::vector<Measurement> calls) {
  std::ranges::sort(calls, {}, &Measurement::seconds);
  Measurement median = calls[(calls.size() - 1) / 2];
  median.least_seconds = calls.front().seconds;
  median.most_seconds = calls.back().seconds;
  return median;
}

// Collective over the mesh.
double flops_of_forward(const Attention& attention, const AttentionProblem& problem, Mesh& mesh) {
  // Ranks that hold copies of the same rows do the same work, which counts once.
  const bool counts = attention.operands().output.is_primary(mesh.rank());
  const double work = mesh.world().sum(std::array{counts ? attention.rank_plan().work() : 0.0},
                                       "work of the ranks")[0];
  return forward_flops(problem.shape, work / static_cast<double>(problem.shape.heads));
}

Report make_report(const CommandContext& context, const ProblemSetup& setup, const Mesh& mesh,
                   Place place, int threads) {
  const Options& options = context.options;
  Report report(
      "run", make_record(context, mesh, place, threads),
      {{"shape", kShapeUnit, 18},
       {"mask", "", 0, 9},
       {"dtype", "", 8, 2},
       {"mesh", "", 6},
       {"schedule", "", 9},
       {"layout", "", 8, 1},
       {"impl", "", 6},
       {"transport", "", 0, 4},
       {"time", "ms", 8, 0,
        "of the slowest rank, without reading and writing files; the median of --repeat"},
       {"least", "ms", 0, options.repeat > 1 ? 0 : 10, "the fastest call of --repeat"},
       {"most", "ms", 0, options.repeat > 1 ? 0 : 10, "the slowest call"},
       {"rate", "GFLOP/s", 9, 0,
        fmt::format("2 N ({}) operations per visible pair, divided by time, all ranks together",
                    options.forward_output.empty() ? "D + Dv" : "3 D + 2 Dv")},
       {"moved", "MiB", 8, 3, "received by all ranks together"},
       {"wait", "ms", 7, 0,
        "for transfers, with nothing to compute; of the rank that waits longest"},
       {"bookkeeping", "%", 0, 5, "largest share of a rank's time that is neither kernel nor wait"},
       {"memory", "MiB/rank", 0, 0, "peak of a rank's memory pool, shards included"}},
      {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("problem", problem_text(setup.problem, setup.layout));
  if (!options.forward_output.empty()) report.add_meta("pass", "backward");
  report.add_meta("mesh", mesh_text(mesh, threads, place));
  add_rank_order(report, context.session);
  return report;
}

void add_result(Report& report, const ProblemSetup& setup, ring::Schedule schedule,
                const std::string& implementations, const std::string& transport,
                const Measurement& measured) {
  report.add_row(
      {shape_cell(setup.problem.shape), mask_cell(setup.problem),
       std::string(annulus::name_of(setup.problem.dtype)), mesh_cell(setup.mesh),
       std::string(ring::name_of(schedule)), ring::layout_text(setup.layout), implementations,
       transport, milliseconds_cell(measured.seconds), milliseconds_cell(measured.least_seconds),
       milliseconds_cell(measured.most_seconds), fmt::format("{:.2f}", measured.gflops()),
       mebibytes_cell(measured.bytes), milliseconds_cell(measured.exposed_seconds),
       percent_cell(measured.bookkeeping), mebibytes_cell(measured.peak_memory, 1)});
}

// The figures of a pass that has no row of its own.
std::string pass_text(const ring::ShardedAttention& attention, const Measurement& measured) {
  const bool repeated = measured.most_seconds > measured.least_seconds;
  const std::string spread =
      repeated ? fmt::format(" ({} to {})", milliseconds_cell(measured.least_seconds),
                             milliseconds_cell(measured.most_seconds))
               : "";
  return fmt::format("{} by {}, {}{} ms, {:.2f} GFLOP/s, {} MiB moved, {} ms waiting",
                     ring::name_of(attention.schedule().schedule),
                     attention.implementations_of_ranks(), milliseconds_cell(measured.seconds),
                     spread, measured.gflops(), mebibytes_cell(measured.bytes),
                     milliseconds_cell(measured.exposed_seconds));
}

// "query 2 MiB, key 1 MiB, ...": a rank's shards, and what the plans add.
std::string memory_text(const Attention& attention, const ring::ShardedAttention* backward,
                        const GradientFiles* gradients, int rank) {
  const ring::ShardedOperands& operands = attention.operands();
  std::string text;
  double total = 0;
  const auto add = [&](const char* name, double bytes) {
    total += bytes;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name,
                        human_bytes(static_cast<std::size_t>(bytes)));
  };
  const auto add_shard = [&](const char* name, const NamedSharding& sharding, DType dtype) {
    add(name, static_cast<double>(sharding.local_shape(rank).product()) *
                  static_cast<double>(size_of(dtype)));
  };
  const DType dtype = attention.plan_input().problem.dtype;
  add_shard("query", operands.query, dtype);
  add_shard("key", operands.key, dtype);
  add_shard("value", operands.value, dtype);
  add_shard("output", operands.output, dtype);
  add_shard("LSE", operands.lse, DType::float32);
  if (operands.bias) add_shard("bias", *operands.bias, DType::float32);
  if (operands.dense_mask) add_shard("mask", *operands.dense_mask, DType::boolean);
  add("buffers", static_cast<double>(attention.extra_bytes()));
  if (gradients != nullptr && backward != nullptr) {
    add_shard("grad_output", operands.output, dtype);
    if (gradients->request().grad_lse) add_shard("grad_lse", operands.lse, DType::float32);
    for (const Result& one : gradients->results()) {
      add_shard(one.name.c_str(), one.sharding, one.dtype);
    }
    add("backward buffers", static_cast<double>(backward->extra_bytes()));
  }
  return fmt::format("{} of rank {}, without the workspace of kernels: {}",
                     human_bytes(static_cast<std::size_t>(total)), rank, text);
}

// The report of --dry-run, in place of a row.
void add_dry_run(Report& report, const Attention& attention, const ring::ShardedAttention* backward,
                 const GradientFiles* gradients, double bytes_of_ranks, int rank) {
  const auto predicted = [](const ring::ScheduleChoice& choice) {
    return choice.seconds > 0 ? ", predicted " + ring::milliseconds_text(choice.seconds)
                              : std::string();
  };
  if (gradients == nullptr || !gradients->has_forward()) {
    report.add_meta(
        "would run",
        fmt::format("{} by {}, transport {}{}, {} received by all ranks",
                    variant_text(attention.schedule()), attention.implementations_of_ranks(),
                    attention.transport(), predicted(attention.schedule()),
                    human_bytes(static_cast<std::size_t>(bytes_of_ranks))));
  }
  if (backward != nullptr) {
    report.add_meta(
        "would run backward",
        fmt::format("{} by {}{}", variant_text(backward->schedule()),
                    backward->implementations_of_ranks(), predicted(backward->schedule())));
  }
  report.add_meta("memory", memory_text(attention, backward, gradients, rank));
  report.set_verdict("dry run: nothing was computed or written", true);
}

// Counts the kernels that have run.
class KernelCounter final : public TraceSink {
 public:
  explicit KernelCounter(Progress& progress) : progress_(progress) {}
  void record(const TraceSpan& span) override {
    if (span.label.category == TraceCategory::kernel) progress_.advance(1);
  }

 private:
  Progress& progress_;
};

// The number of kernels that progress can count; 0 if a device reports only at the end, or for two
// or three kernels, which are too few.
double countable_kernels(const Attention& attention, Place place) {
  constexpr std::size_t kEnough = 4;
  const std::size_t kernels = attention.rank_plan().all<ring::Block>().size();
  return place.is_host() && kernels >= kEnough ? static_cast<double>(kernels) : 0;
}

}  // namespace

ExitCode run_command(const CommandContext& context) {
  const Options& options = context.options;
  // Depends only on the options, so all ranks throw alike.
  check_files_are_given(options);
  const std::unique_ptr<Context> ranks = open_context(context);
  Mesh& mesh = ranks->mesh();
  Device& device = ranks->device();
  Control& world = mesh.world();
  const bool leader = mesh.rank() == 0;

  // Errors in the input are found before any work.
  begin_step("annulus run was reading the headers of its input files");
  const InputTensors inputs = collectively(world, [&] { return open_inputs(options); });
  require_same(world, "input files",
               fmt::format("{} {}", to_string(inputs.shape), annulus::name_of(inputs.dtype)));
  ProblemSetup setup = settled_problem(options, inputs.shape, inputs.dtype, *ranks);
  const AttentionProblem& problem = setup.problem;
  const ring::ShardedOperands operands = shard_operands(setup);
  if (leader) print_warnings(setup.warnings);

  begin_step("annulus run was preparing its plan and kernels");
  Progress progress(leader ? progress_terminal() : files::FileDescriptor());
  TraceCollector collector;
  KernelCounter counter(progress);
  Tracer tracer;
  tracer.add_sink(collector);
  tracer.add_sink(counter);
  setup.problem.tracer = &tracer;

  // Reports and files are opened before long work such as tuning, so that an impossible name fails
  // early.
  Report report = make_report(context, setup, mesh, device.place(), ranks->threads());
  std::optional<GradientFiles> gradients;
  if (!options.grad_output.empty()) gradients.emplace(options, problem, operands, mesh);
  const bool computes_forward = !gradients || !gradients->has_forward();
  std::vector<Result> results;
  if (computes_forward) results = forward_results(options, problem, operands);
  if (gradients) std::ranges::copy(gradients->results(), std::back_inserter(results));
  ResultFiles result_files(std::move(results), mesh);
  std::optional<TraceFile> trace;
  if (!options.trace.empty()) trace.emplace(options.trace, world);
  std::optional<ReportFiles> report_files;
  collectively(world, [&] {
    if (leader) report_files.emplace(options.json, options.csv, report);
  });

  progress.begin("planning and preparing kernels");
  Attention attention(*ranks, setup.problem);
  if (gradients) attention.prepare_backward(gradients->request());
  log_choices(problem, attention, mesh);
  if (leader) progress.aside([&] { print_warnings(attention.decision().warnings); });
  if (attention.decision().by == ring::DecidedBy::measurement) device.memory().reset_peak();

  const ring::ShardedAttention* const backward =
      gradients ? attention.backward_pass(gradients->request()) : nullptr;
  if (leader) {
    progress.aside([&] {
      std::vector<ring::Schedule> chosen{attention.schedule().schedule};
      if (backward != nullptr) chosen.push_back(backward->schedule().schedule);
      print_warnings(hints_of_choice(
          options, chosen,
          backward == nullptr ? std::nullopt : std::optional(backward->adds_rounded_gradients())));
    });
  }
  add_price_of_order(attention.schedule(), "forward", report);
  if (backward != nullptr) add_price_of_order(backward->schedule(), "backward", report);
  if (options.explain) {
    report.add_meta("layout chosen", why_layout_text(setup));
    explain(attention, backward, report);
  }
  const auto write_report = [&] {
    progress.end();
    collectively(world, [&] {
      if (!leader) return;
      if (!report_files->replace_table()) {
        report.write_table(context.out);
        if (options.show_ranks > 0) {
          const Computing computing = world.computing();
          print_plan(ring::make_plan(attention.plan_input(), attention.schedule().schedule),
                     options.show_ranks, context.out);
        }
      }
      report_files->write(report, context.out);
    });
  };
  if (options.dry_run) {
    const double bytes =
        world.sum(std::array{static_cast<double>(attention.rank_plan().bytes_received())},
                  "received bytes")[0];
    add_dry_run(report, attention, backward, gradients ? &*gradients : nullptr, bytes, mesh.rank());
    write_report();
    return ExitCode::success;
  }

  begin_step("annulus run was reading query, key and value");
  MemoryPool& memory = device.staging();
  Tensor query, key, value, bias, mask, output, lse, maximum, sum, weights;
  progress.begin("reading query, key and value");
  collectively(world, [&] {
    constexpr double kDiskTimeouts = 20;  // may pass before a disk counts as hung
    const Computing reading = world.computing(kDiskTimeouts);
    const TraceScope scope(&tracer, "files", {TraceCategory::file, "read"});
    const auto read = [&](const char* name, const files::ArrayFile& file,
                          const NamedSharding& sharding) {
      const std::string shown = options.input.empty() ? fmt::format("--{} {}", name, file.path())
                                                      : "--input " + options.input;
      return verification::for_tensor(fmt::format("{}: {}", shown, name), [&] {
        return read_shard(file, sharding, mesh.rank(), options.bhtd, memory);
      });
    };
    query = read("query", inputs.query, operands.query);
    key = read("key", inputs.key, operands.key);
    value = read("value", inputs.value, operands.value);
    const auto make = [&](const char* name, DType dtype, const NamedSharding& sharding) {
      return verification::unfilled(fmt::format("{} (by the shape of --query)", name), dtype,
                                    sharding.local_shape(mesh.rank()), memory);
    };
    output = make("output", problem.dtype, operands.output);
    if (problem.normalize_output) {
      lse = make("LSE", DType::float32, operands.lse);
    } else {
      maximum = make("maximum", DType::float32, operands.lse);
      sum = make("sum", DType::float32, operands.lse);
    }
    if (!computes_forward) gradients->read_forward(output.view(), lse.view());
    const auto scores = [&](const char* name, const std::optional<NamedSharding>& sharding,
                            DType dtype, const verification::FillPart& fill) {
      return sharding ? verification::filled_part(name, sharding->index(mesh.rank()), dtype, fill,
                                                  memory)
                      : Tensor();
    };
    bias = scores("bias", operands.bias, DType::float32, setup.fills.bias);
    mask = scores("mask", operands.dense_mask, DType::boolean, setup.fills.mask);
    if (problem.weights) {
      weights = make("attention weights", weights_dtype(problem),
                     ring::weights_sharding(problem, operands));
    }
  });
  const ring::LocalTensors tensors{query.view(), key.view(),    value.view(), output.view(),
                                   lse.view(),   bias.view(),   mask.view(),  maximum.view(),
                                   sum.view(),   weights.view()};
  verification::DeviceTensors moved = collectively(
      world, [&] { return verification::DeviceTensors(tensors, device, mesh.watchdog()); });
  if (gradients) gradients->read(device);
  moved.upload();
  world.barrier("start of the call");
  begin_step("annulus run was computing");
  // Makes the calls of --repeat and measures each by its own spans of the trace.
  const auto measure_calls = [&](const ring::RankPlan& plan, double flops, const auto& call) {
    std::vector<Measurement> calls;
    for (int i = 0; i < options.repeat; ++i) {
      const auto before = static_cast<std::ptrdiff_t>(collector.spans().size());
      call();
      const std::vector<TraceSpan>& spans = collector.spans();
      calls.push_back(measure(summarize({spans.begin() + before, spans.end()}), plan, flops,
                              device.memory().statistics(), mesh));
    }
    return median_of(std::move(calls));
  };
  Measurement measured;
  if (computes_forward) {
    progress.begin("attention", options.repeat * countable_kernels(attention, device.place()));
    measured = measure_calls(attention.rank_plan(), flops_of_forward(attention, problem, mesh),
                             [&] { attention.run_and_wait(moved.tensors()); });
    moved.download();
    if (leader) log_info("computed in {:.3f} ms, slowest rank", measured.seconds * 1e3);
  }
  Measurement measured_backward;
  if (gradients) {
    begin_step("annulus run was computing gradients");
    progress.begin("gradients");
    measured_backward =
        measure_calls(backward->rank_plan(), backward_flops(problem.shape, visible_pairs(problem)),
                      [&] { gradients->compute(attention, moved.tensors(), device); });
  }
  const char* const written = computes_forward ? "--output" : "--grad-query";
  progress.begin("writing output");
  {
    begin_step(fmt::format("annulus run was writing {}", written));
    const TraceScope scope(&tracer, "files", {TraceCategory::file, "write"});
    if (gradients) gradients->write(result_files);
    result_files.write(tensors);
    result_files.commit();
  }
  begin_step(fmt::format("annulus run, with {} complete, was reporting", written));
  if (leader) log_info("wrote {}", computes_forward ? options.output : options.grad_query);
  if (computes_forward) {
    add_result(report, setup, attention.schedule().schedule, attention.implementations_of_ranks(),
               attention.transport(), measured);
    if (gradients) {
      report.add_meta("pass", "the table is of the forward pass");
      report.add_meta("backward", pass_text(*backward, measured_backward));
    }
  } else {
    add_result(report, setup, backward->schedule().schedule, backward->implementations_of_ranks(),
               backward->transport(), measured_backward);
  }
  if (backward != nullptr) add_rounding(*backward, report);
  if (trace) trace->commit(gather_trace(collector.spans(), mesh), report);
  write_report();
  return ExitCode::success;
}

}  // namespace annulus::launcher
