#include "launcher/bench/calibration.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/cores.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/bench/bench_hops.hpp"
#include "launcher/bench/timing.hpp"
#include "launcher/options/as_option.hpp"
#include "launcher/report/machine.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/setup/open_device.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// What is measured on a kind of device unless --sweep says otherwise: large enough for the kernel
// to reach its rate, small enough to take seconds.
struct Extent {
  SweepRange rows;
  std::int64_t call_rows;  ///< of the smallest block, which costs hardly more than its call
  SweepRange hop_bytes;
};
constexpr Extent kOnHost{{128, 2048, 2}, 1, {4 << 10, 16 << 20, 4}};
constexpr Extent kOnGpu{{1 << 10, 16 << 10, 2}, 128, {64 << 10, 256 << 20, 4}};
// Calls in a row that one time covers, so that starting and waiting hardly count.
constexpr int kCallsPerTime = 8;

/// Square blocks of one problem's heads, dtype and mask on one rank, and the states that they give.
class KernelBlocks {
 public:
  KernelBlocks(const Options& options, const AttentionShape& heads, std::int64_t most_rows,
               Device& device, Watchdog watchdog, int threads)
      : options_(options),
        heads_(heads),
        device_(device),
        threads_(threads),
        stream_(device.make_stream("compute", std::move(watchdog), nullptr)),
        query_(random(verification::Operand::query, heads.heads, heads.head_dim, most_rows)),
        key_(random(verification::Operand::key, heads.kv_heads, heads.head_dim, most_rows)),
        value_(random(verification::Operand::value, heads.kv_heads, heads.value_dim, most_rows)) {
    for (State& state : states_) {
      state.lse = Tensor(DType::float32, {heads.batch, heads.heads, most_rows}, device.memory());
    }
  }

  /// Makes blocks of `rows` rows and columns ready. Not collective; throws UserErrors.
  void select(std::int64_t rows) {
    AttentionShape shape = heads_;
    shape.query_length = shape.kv_length = rows;
    Options alone = options_;
    alone.mesh = "sp=1";
    alone.query_spec = alone.kv_spec = "-";
    kernel_.reset();
    if (!alone.bias.empty() || !alone.mask.empty()) {
      throw UserError("--calibrate: measures kernels without --bias and --mask");
    }
    problem_ = set_up_problem(alone, shape, options_.dtype.value_or(DType::float32), 1).problem;
    const PositionRange all{GlobalPosition(0), rows, 1};
    const Visibility seen = problem_.mask.examine(0, shape.batch, all, all);
    if (seen.empty()) {
      throw ArgumentError("--calibrate", fmt::format("a mask that hides all of {} rows", rows),
                          "visible pairs to compute");
    }
    flops_ = forward_flops(shape, static_cast<double>(seen.pairs));
    block_ = {cut(query_, rows),
              cut(key_, rows),
              cut(value_, rows),
              PositionRanges::all(rows),
              PositionRanges::all(rows),
              0,
              0,
              seen.full,
              {}};
    Selection selection = registry_.select(options_.implementation, problem_, device_.place());
    std::string reasons;
    for (const Implementation* candidate : selection.candidates) {
      std::string reason = candidate->takes(problem_, geometry_of(block_)).reason();
      if (reason.empty()) reason = prepare(*candidate);
      if (reason.empty()) return;
      reasons += fmt::format("; {}: {}", candidate->names().front(), reason);
    }
    throw UnsupportedError(
        fmt::format("--calibrate: no implementation can compute {} rows{}", rows, reasons));
  }

  /// Computes the block into both states, `calls` times in all, and waits for the end.
  void compute(int calls) {
    const std::int64_t rows = block_.query.shape()[1];
    for (int i = 0; i < calls; ++i) {
      kernel_->forward(block_, state(static_cast<std::size_t>(i % 2), rows),
                       {*stream_, nullptr, threads_});
    }
    stream_->synchronize();
  }

  /// Merges one state into the other, `calls` times, and waits for the end.
  void merge(int calls) {
    const std::int64_t rows = block_.query.shape()[1];
    const std::vector<PartialState> parts{{state(0, rows), 0, 0}, {state(1, rows), 0, 0}};
    for (int i = 0; i < calls; ++i) operations_->combine(parts, state(0, rows), *stream_);
    stream_->synchronize();
  }

  [[nodiscard]] double flops() const noexcept { return flops_; }
  /// Bytes of one merge as a reduction counts them: two results read, one written.
  [[nodiscard]] double merge_bytes() const {
    const Extents shape = cut(states_[0].output, block_.query.shape()[1]).shape();
    return 3.0 * static_cast<double>(size_of(states_[0].output.view().dtype())) *
           static_cast<double>(shape.product());
  }
  [[nodiscard]] const std::string& implementation() const noexcept { return implementation_; }
  [[nodiscard]] const AttentionProblem& problem() const noexcept { return problem_; }

 private:
  struct State {
    Tensor output, lse;
  };

  // Why it cannot; empty if it is ready.
  std::string prepare(const Implementation& chosen) {
    implementation_ = chosen.names().front();
    kernel_ = chosen.make_kernel(problem_, device_);
    // Partial results, as the blocks of a ring have them.
    const DType dtype =
        chosen.declares().results == ResultForm::rounded ? problem_.dtype : DType::float32;
    for (State& state : states_) {
      if (state.output.shape().rank() > 0 && state.output.view().dtype() == dtype) continue;
      state.output =
          Tensor(dtype, {heads_.batch, query_.shape()[1], heads_.heads, heads_.value_dim},
                 device_.memory());
    }
    try {
      kernel_->prepare(block_, state(0, block_.query.size(1)));
    } catch (const UnsupportedError& refusal) {
      kernel_.reset();
      return refusal.what();
    }
    return {};
  }

  Tensor random(verification::Operand operand, std::int64_t heads, std::int64_t dim,
                std::int64_t rows) {
    const Extents shape{heads_.batch, rows, heads, dim};
    std::vector<PositionRanges> index;
    for (const std::int64_t size : shape) index.push_back(PositionRanges::all(size));
    HostMemoryPool staging;
    const Tensor values =
        verification::random_part(std::move(index), shape, options_.dtype.value_or(DType::float32),
                                  options_.seed, operand, staging, threads_);
    Tensor result(values.view().dtype(), shape, device_.memory());
    device_.copy(values.view(), result.view(), *stream_);
    stream_->synchronize();
    return result;
  }

  [[nodiscard]] static TensorView cut(const Tensor& tensor, std::int64_t rows) {
    return tensor.view().slice(1, 0, rows);
  }
  [[nodiscard]] SoftmaxState state(std::size_t which, std::int64_t rows) const {
    const State& chosen = states_.at(which);
    return {cut(chosen.output, rows), chosen.lse.view().slice(2, 0, rows)};
  }

  const Options& options_;
  AttentionShape heads_;
  Device& device_;
  int threads_;
  Registry registry_ = Registry::standard();
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ring::LocalOperations> operations_ = ring::make_local_operations(device_.place());
  Tensor query_, key_, value_;
  std::array<State, 2> states_;
  AttentionProblem problem_;
  AttentionBlock block_;
  std::unique_ptr<Kernel> kernel_;
  std::string implementation_;
  double flops_ = 0;
};

// Median seconds of one of several calls in a row.
template <class Body>
double seconds_per_call(const Options& options, Control& world, const Body& body) {
  for (int i = 0; i < options.warmup; ++i) body(kCallsPerTime);
  return time_calls(options.iterations, world, [&] { body(kCallsPerTime); }).median / kCallsPerTime;
}

void measure_kernel(ring::CostModel& model, KernelBlocks& blocks, const Extent& extent,
                    const Options& options, Control& world) {
  const auto seconds = [&](std::int64_t rows) {
    collectively(world, [&] { blocks.select(rows); });
    return seconds_per_call(options, world, [&](int calls) { blocks.compute(calls); });
  };
  model.call_latency = seconds(extent.call_rows);
  std::vector<ring::CostCurve::Point> points;
  const SweepRange& sweep = extent.rows;
  for (std::int64_t rows = sweep.begin; rows <= sweep.end; rows *= sweep.factor) {
    const double time = seconds(rows);
    // A block of few rows may take no longer than the smallest one: the call is most of its time.
    const double computing = std::max(time - model.call_latency, time / 2);
    points.push_back({static_cast<double>(rows), blocks.flops() / computing});
  }
  model.kernels.emplace(blocks.implementation(), ring::CostCurve(std::move(points), "kernel"));
  const double merge = seconds_per_call(options, world, [&](int calls) { blocks.merge(calls); });
  model.merge_bytes_per_second = blocks.merge_bytes() / merge;
}

void measure_transports(ring::CostModel& model, const std::vector<TransportHops>& all,
                        Report& report) {
  for (const TransportHops& one : all) {
    if (!one.skipped.empty()) {
      report.add_meta(one.transport + " skipped", one.skipped);
      continue;
    }
    model.transports.emplace(one.transport, one.curve());
    model.transport = one.transport;  // the last is the one that ranks prefer
  }
  if (model.transports.empty()) {
    throw UnsupportedError("--calibrate: no transport between the ranks could be measured");
  }
}

void add_rows(Report& report, const ring::CostModel& model) {
  const auto add = [&](std::string what, const std::string& size, double value, const char* unit) {
    report.add_row({std::move(what), size, fmt::format("{:.3f}", value), unit});
  };
  add("call", "-", model.call_latency * 1e6, "µs");
  for (const auto& [name, curve] : model.kernels) {
    for (const auto& point : curve.points()) {
      add(name, fmt::format("{:.0f} rows", point.size), point.value * 1e-9, "GFLOP/s");
    }
  }
  add("merge", "-", model.merge_bytes_per_second * 1e-9, "GB/s");
  for (const auto& [name, curve] : model.transports) {
    for (const auto& point : curve.points()) {
      add(name, fmt::format("{:.0f} bytes", point.size), point.value * 1e6, "µs");
    }
  }
}

}  // namespace

ExitCode calibrate(const CommandContext& context) {
  const Options& options = context.options;
  if (!options.shape) {
    throw ArgumentError("--shape", "nothing",
                        "B,T,S,N,K,D or B,T,S,N,K,D,Dv (T and S do not matter)");
  }
  if (context.session.size() < 2) {
    throw ArgumentError("--calibrate", "1 rank", "2 or more, under mpirun");
  }
  Mesh mesh(set_up_mesh(options, context.session.size()), context.session.world(),
            Watchdog(Watchdog::Seconds(options.timeout)));
  Control& world = mesh.world();
  const std::unique_ptr<Device> device = open_device(options, mesh);
  Extent extent = device->place().is_host() ? kOnHost : kOnGpu;
  if (options.sequence_sweep) extent.rows = *options.sequence_sweep;
  const int threads = threads_per_rank(mesh, options.threads);
  Report report("bench.calibrate", make_record(context, mesh, device->place(), threads),
                {{"what", "", 8}, {"size", "", 16}, {"value", "", 12}, {"unit", "", 8}},
                {options.wide, options.legend});
  report.add_meta("options", options.given);
  std::optional<files::TextFile> file;
  std::optional<ReportFiles> report_files;
  collectively(world, [&] {
    if (mesh.rank() != 0) return;
    as_option("--calibrate " + options.calibrate, [&] { file.emplace(options.calibrate); });
    report_files.emplace(options.json, options.csv, report);
  });
  AttentionShape largest = *options.shape;
  largest.query_length = largest.kv_length = std::max(extent.rows.end, extent.call_rows);
  collectively(world, [&] { as_option("--shape", [&] { largest.validate(); }); });

  ring::CostModel model;
  {
    KernelBlocks blocks = collectively(world, [&] {
      return KernelBlocks(options, *options.shape, largest.query_length, *device, mesh.watchdog(),
                          threads);
    });
    measure_kernel(model, blocks, extent, options, world);
    const AttentionShape& s = blocks.problem().shape;
    model.source = fmt::format(
        "measured: {} on {} ({}), {} per rank, B={} N={} K={} D={} Dv={} {}, mask {}, {}",
        counted(mesh.size(), "rank"), counted(mesh.topology().nodes(), "node"),
        device_name(device->place()), counted(threads, "thread"), s.batch, s.heads, s.kv_heads,
        s.head_dim, s.value_dim, annulus::name_of(blocks.problem().dtype),
        to_string(blocks.problem().mask), blocks.implementation());
  }
  measure_transports(model,
                     measure_hops(mesh, *device, options.transport, extent.hop_bytes,
                                  options.warmup, options.iterations),
                     report);
  collectively(world, [&] {
    if (!file) return;
    report.add_meta("source", model.source);
    report.add_meta("transport", model.transport);
    add_rows(report, model);
    file->commit(ring::to_json(model) + "\n");
    if (!report_files->replace_table()) report.write_table(context.out);
    report_files->write(report, context.out);
  });
  return ExitCode::success;
}

}  // namespace annulus::launcher
