#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/modifiers.hpp>
#include <annulus/attention/problem_class.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/cost_model.hpp>
#include <annulus/ring/machine.hpp>

#include "launcher/bench/bench_hops.hpp"
#include "launcher/bench/calibration/call_and_rates.hpp"
#include "launcher/bench/calibration/kernel_blocks.hpp"
#include "launcher/bench/calibration/memory_rates.hpp"
#include "launcher/bench/timing.hpp"
#include "launcher/commands/commands.hpp"
#include "launcher/options/as_option.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// The sizes measured on a kind of device unless --sweep names others: large enough for the kernel
// to reach its rate, small enough to take seconds.
struct Extent {
  SweepRange rows;
  std::int64_t call_rows;  ///< of the smallest block
  double least_call;       ///< seconds
  SweepRange hop_bytes;
};
constexpr Extent kOnHost{{128, 2048, 2}, 1, 1e-7, {4 << 10, 16 << 20, 4}};
constexpr Extent kOnGpu{{1 << 10, 32 << 10, 2}, 128, 2e-6, {64 << 10, 256 << 20, 4}};
// Bias and dense mask grow with the square of the rows.
constexpr std::int64_t kMaximumRowsWithScores = 16 << 10;
// Each timing covers several calls in a row, so that starting and waiting hardly count: as many as
// take this long, up to a limit.
constexpr double kLongTime = 10e-3;  // seconds
constexpr int kMaximumCallsPerTime = 64;
// Once a call takes this long, larger blocks are left out, since their rate is the same.
constexpr double kLongestCall = 0.1;
// Compared cases are measured in turns, so that none benefits when a GPU slows down.
constexpr int kRounds = 3;

// A GPU that has worked for a while runs slower than a rested one. Attention over long sequences
// keeps it busy, so every timing starts after the GPU has done the same work for this long.
constexpr double kBusyBefore = 0.15;  // seconds

/// Times calls on all ranks together.
class Clock {
 public:
  /// body(calls) makes this many calls.
  using Body = std::function<void(int calls)>;

  Clock(const Options& options, Control& world, Place place)
      : warmup_(options.warmup),
        iterations_(options.iterations),
        busy_before_(place.is_host() ? 0 : kBusyBefore),
        world_(world) {}

  /// Median seconds per call, for each body. Collective.
  [[nodiscard]] std::vector<double> seconds_per_call(const std::vector<Body>& bodies) {
    std::vector<int> calls;
    for (const Body& body : bodies) {
      body(1);
      const double once = seconds_of(world_, [&] { body(1); });
      calls.push_back(static_cast<int>(
          std::clamp(kLongTime / once, 1.0, static_cast<double>(kMaximumCallsPerTime))));
      for (int i = 0; i < warmup_; ++i) body(calls.back());
    }
    std::vector<std::vector<double>> seconds(bodies.size());
    const int rounds = bodies.size() == 1 ? 1 : std::min(kRounds, iterations_);
    for (int round = 0; round < rounds; ++round) {
      const int times = (iterations_ + round) / rounds;
      for (std::size_t i = 0; i < bodies.size(); ++i) {
        const auto body = [&] { bodies[i](calls[i]); };
        const std::int64_t begin = monotonic_ns();
        while (static_cast<double>(monotonic_ns() - begin) * 1e-9 < busy_before_) body();
        for (int time = 0; time < times; ++time) seconds[i].push_back(seconds_of(world_, body));
      }
    }
    std::vector<double> medians;
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      medians.push_back(timing_of(std::move(seconds[i])).median / calls[i]);
    }
    return medians;
  }
  [[nodiscard]] double seconds_per_call(const Body& body) {
    return seconds_per_call(std::vector<Body>{body})[0];
  }

 private:
  int warmup_;
  int iterations_;
  double busy_before_;
  Control& world_;
};

/// An implementation and the times of its blocks.
struct Measured {
  const Implementation* candidate = nullptr;
  std::optional<BlockTime> smallest = {};
  std::vector<BlockTime> times = {};
  bool slow = false;  ///< larger blocks are left out

  [[nodiscard]] const std::string& name() const { return candidate->names().front(); }
};

// Times one size of block with all candidates that compute it. take(candidate, time) stores a time.
template <class Take>
void measure_size(std::int64_t rows, std::vector<Measured>& candidates, KernelBlocks& blocks,
                  Clock& clock, Control& world, Report& report, const Take& take) {
  collectively(world, [&] { blocks.select(rows); });
  std::vector<Measured*> ready;
  std::vector<Clock::Body> bodies;
  for (Measured& one : candidates) {
    if (one.slow) continue;
    const std::string obstacle = world.first_text(
        collectively(world, [&] { return blocks.prepare(*one.candidate); }), "what kernels refuse");
    if (!obstacle.empty()) {
      report.add_meta(fmt::format("{} passed over, {} rows", one.name(), rows), obstacle);
      continue;
    }
    ready.push_back(&one);
    bodies.emplace_back(
        [&blocks, candidate = one.candidate](int calls) { blocks.compute(*candidate, calls); });
  }
  const std::vector<double> seconds = clock.seconds_per_call(bodies);
  for (std::size_t i = 0; i < ready.size(); ++i) {
    const double share = blocks.used_share(*ready[i]->candidate);
    take(*ready[i], BlockTime{static_cast<double>(rows), blocks.flops() / share, seconds[i]});
  }
}

// Throws on all ranks unless all have the same candidates, since the measurement of each is
// collective.
void check_same_candidates(const Selection& selection, Control& world) {
  std::string mine;
  for (const Implementation* candidate : selection.candidates) {
    mine += (mine.empty() ? "" : ", ") + candidate->names().front();
  }
  if (const auto other = world.first_difference(mine, "implementations to calibrate")) {
    throw ArgumentError(fmt::format("--calibrate: implementations on rank {}", other->rank),
                        other->text, fmt::format("as on rank 0: {}", other->expected));
  }
}

// Measures the class of the options' problem for each implementation that computes it. `how`
// becomes part of the source.
void measure_kernels(ring::CostModel& model, KernelBlocks& blocks, const Extent& extent,
                     const std::string& how, Clock& clock, Control& world, Report& report) {
  const ProblemClass problem = class_of(blocks.problem(), blocks.pass());
  const AttentionShape& s = blocks.problem().shape;
  report.add_meta("class", to_string(problem));
  check_same_candidates(blocks.selection(), world);
  std::vector<Measured> candidates;
  for (const Implementation* one : blocks.selection().candidates) candidates.push_back({one});
  measure_size(extent.call_rows, candidates, blocks, clock, world, report,
               [](Measured& one, const BlockTime& time) { one.smallest = time; });
  std::erase_if(candidates, [](const Measured& one) { return !one.smallest; });
  const SweepRange& sweep = extent.rows;
  for (std::int64_t rows = sweep.begin; rows <= sweep.end; rows *= sweep.factor) {
    const bool last = rows * sweep.factor > sweep.end;
    measure_size(rows, candidates, blocks, clock, world, report,
                 [&](Measured& one, const BlockTime& time) {
                   one.times.push_back(time);
                   one.slow = time.seconds >= kLongestCall;
                   if (!one.slow || last) return;
                   report.add_meta(
                       fmt::format("{} measured up to", one.name()),
                       fmt::format("{} rows, of which a call takes {:.2f} s", rows, time.seconds));
                 });
  }
  for (const Measured& one : candidates) {
    if (one.times.empty()) continue;
    CallAndRates found = call_and_rates(*one.smallest, one.times, extent.least_call);
    // emplace() keeps the first of several candidates with the same kernel.
    model.kernels[one.candidate->kernel_name()].emplace(
        problem,
        ring::KernelCost{fmt::format("{}: B={} N={} K={}, mask {}, as many columns as rows; {}",
                                     one.name(), s.batch, s.heads, s.kv_heads,
                                     mask_and_modifiers_text(blocks.problem()), how),
                         ring::CostCurve(std::move(found.rates), "kernel"), found.call});
  }
  if (model.kernels.empty()) {
    throw UnsupportedError(fmt::format(
        "--calibrate: no implementation computes blocks of up to {} rows", extent.rows.end));
  }
}

// Measures merges and reads.
void measure_memory(ring::CostModel& model, Device& device, const Watchdog& watchdog, int threads,
                    Clock& clock, Control& world, Report& report) {
  const auto seconds_of_call = [&](const Clock::Body& body) {
    return clock.seconds_per_call(body);
  };
  model.merge_bytes_per_second = measure_merge_rate(world, device, watchdog, seconds_of_call);
  const ReadRate reading = measure_read_rate(world, device, watchdog, threads, seconds_of_call);
  model.read_bytes_per_second = reading.bytes_per_second;
  report.add_meta("reading", reading.bytes_per_second ? "one row, by " + reading.text
                                                      : "assumed, since " + reading.text);
}

// The number of ranks on each node if nodes are equal and ranks are numbered by node; else 0.
int even_ranks_per_node(const Mesh& mesh) {
  const Topology& topology = mesh.topology();
  const int each = mesh.size() / topology.nodes();
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (topology.node_of_rank[static_cast<std::size_t>(rank)] != rank / each) return 0;
  }
  return each;
}

// Times rings inside the nodes, all at once. If there are none, the report says why.
std::vector<TransportHops> hops_inside_nodes(const CommandContext& context, const Mesh& mesh,
                                             Device& device, const SweepRange& sizes,
                                             Report& report) {
  const int each = even_ranks_per_node(mesh);
  if (each < 2) {
    report.add_meta("transports inside nodes",
                    each == 1 ? "not measured: each node has one rank"
                              : "not measured: nodes differ in ranks, or ranks are not numbered by "
                                "node");
    return {};
  }
  Mesh by_node(fmt::format("node={},inside={}", mesh.topology().nodes(), each),
               context.session.world(), Watchdog(Watchdog::Seconds(context.options.timeout)));
  return measure_hops(by_node, {"inside"}, device, context.options.transport, sizes,
                      context.options.warmup, context.options.iterations);
}

// Curves of the transports that have messages of their own; composite sends by the others.
std::vector<std::pair<std::string, ring::CostCurve>> curves_of(
    const std::vector<TransportHops>& all, const std::string& where, Report& report) {
  std::vector<std::pair<std::string, ring::CostCurve>> curves;
  for (const TransportHops& one : all) {
    if (!one.skipped.empty()) {
      report.add_meta(one.transport + where + " skipped", one.skipped);
    } else if (transport_traits(one.transport).inside.empty()) {
      curves.emplace_back(one.transport, one.curve().rising());
    }
  }
  return curves;
}

// The slowest hop of a ring over several nodes is one between nodes, and says nothing about hops
// inside.
void measure_transports(ring::CostModel& model, const CommandContext& context, Mesh& mesh,
                        Device& device, const SweepRange& sizes, Report& report) {
  const Options& options = context.options;
  const std::vector<TransportHops> all = measure_hops(
      mesh, all_axes(mesh), device, options.transport, sizes, options.warmup, options.iterations);
  auto inside = curves_of(all, "", report);
  if (mesh.topology().nodes() > 1) {
    if (!inside.empty()) {
      model.network = inside.front().second;
      model.assumed.erase("network_hops");
    }
    inside =
        curves_of(hops_inside_nodes(context, mesh, device, sizes, report), " inside nodes", report);
  }
  if (!inside.empty()) {
    model.transports = {inside.begin(), inside.end()};
    model.transport = inside.front().first;  // the preferred one comes first
    model.assumed.erase("transports");
  }
  if (mesh.topology().nodes() > 1) {
    const auto preferred = std::find_if(all.begin(), all.end(), [&](const TransportHops& one) {
      return one.skipped.empty() && model.knows(one.transport);
    });
    if (preferred != all.end()) model.transport = preferred->transport;
  }
  if (model.assumed.contains("transports") && model.assumed.contains("network_hops")) {
    throw UnsupportedError("--calibrate: no transport between the ranks could be measured");
  }
}

void add_rows(Report& report, const ring::CostModel& model) {
  const auto add = [&](std::string what, const std::string& size, double value, const char* unit) {
    report.add_row({std::move(what), size, fmt::format("{:.3f}", value), unit});
  };
  for (const auto& [name, classes] : model.kernels) {
    for (const auto& [problem, cost] : classes) {
      add(name, "call", cost.call_latency * 1e6, "µs");
      for (const auto& point : cost.rate.points()) {
        add(name, fmt::format("{:.0f} rows", point.size), point.value * 1e-9, "GFLOP/s");
      }
    }
  }
  add("merge", "-", model.merge_bytes_per_second * 1e-9, "GB/s");
  if (model.read_bytes_per_second) add("read", "-", *model.read_bytes_per_second * 1e-9, "GB/s");
  const auto add_messages = [&](const std::string& name, const ring::CostCurve& curve) {
    for (const auto& point : curve.points()) {
      add(name, fmt::format("{:.0f} bytes", point.size), point.value * 1e6, "µs");
    }
  };
  if (!model.assumed.contains("transports")) {
    for (const auto& [name, curve] : model.transports) add_messages(name, curve);
  }
  if (!model.assumed.contains("network_hops")) add_messages("network", model.network);
}

// The node and its GPU; empty for a CPU.
std::string gpu_of(const Mesh& mesh, Place place) {
  if (place.is_host()) return {};
  const CudaDeviceInfo gpu = cuda_devices().at(static_cast<std::size_t>(place.device));
  return fmt::format("{} {} {}",
                     mesh.topology().node_of_rank[static_cast<std::size_t>(mesh.rank())],
                     gpu.bus_id, gpu.uuid);
}

// "measured: 4 ranks on 1 node (NVIDIA H200), sharing 2 GPUs". Collective.
std::string source_text(Mesh& mesh, Place place, int threads) {
  Control& world = mesh.world();
  const std::set<std::string> names = world.distinct_texts(
      collectively(world, [&] { return device_name(place); }), "names of devices");
  const std::set<std::string> gpus = world.distinct_texts(
      collectively(world, [&] { return gpu_of(mesh, place); }), "GPUs of ranks");
  const std::set<std::string> threads_of_ranks =
      world.distinct_texts(std::to_string(threads), "threads of ranks");
  std::string text = fmt::format("measured: {} on {} ({})", counted(mesh.size(), "rank"),
                                 counted(mesh.topology().nodes(), "node"), fmt::join(names, ", "));
  if (place.is_host()) {
    return text + fmt::format(", {} thread{} per rank", fmt::join(threads_of_ranks, " or "),
                              threads_of_ranks == std::set<std::string>{"1"} ? "" : "s");
  }
  const int count = static_cast<int>(gpus.size());
  return count < mesh.size() ? text + ", sharing " + counted(count, "GPU") : text;
}

// Describes how a class was measured.
std::string how_text(const CommandContext& context, Place place) {
  const Options& options = context.options;
  std::string times =
      fmt::format("{} after {} to warm up", counted(options.iterations, "time"), options.warmup);
  if (!place.is_host()) times += fmt::format(" and {} s of the same work", kBusyBefore);
  times += fmt::format(", kernels in turn, {} rounds at most", kRounds);
  return fmt::format("{}, {}, commit {}",
                     place.is_host() ? "rates of a rank" : "rates of a GPU that is full", times,
                     context.commit);
}

// Reads the model in the file, which must be of the same machine; nothing if there is no file.
std::optional<ring::CostModel> read_known(const std::string& path, const std::string& source,
                                          Place place) {
  if (!std::filesystem::is_regular_file(path)) return std::nullopt;
  ring::CostModel model = ring::parse_cost_model(files::read_text(path), path);
  model.check_place(place);
  model.check_source(source);
  return model;
}

// "native: float32 D=64 Dv=64, mask none; native: …".
std::string classes_text(const ring::CostModel& model) {
  std::string text;
  for (const auto& [name, classes] : model.kernels) {
    for (const auto& [problem, cost] : classes) {
      text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", name, to_string(problem));
    }
  }
  return text;
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
  begin_step("annulus bench was calibrating");
  const std::unique_ptr<Context> ranks = open_context(context);
  Mesh& mesh = ranks->mesh();
  Control& world = mesh.world();
  Device* const device = &ranks->device();
  Extent extent = device->place().is_host() ? kOnHost : kOnGpu;
  if (!(options.bias.empty() && options.mask.empty())) {
    extent.rows.end = std::min(extent.rows.end, kMaximumRowsWithScores);
  }
  if (options.sequence_sweep) extent.rows = *options.sequence_sweep;
  const int threads = ranks->threads();
  Report report("bench.calibrate", make_record(context, mesh, device->place(), threads),
                {{"what", "", 8}, {"size", "", 16}, {"value", "", 12}, {"unit", "", 8}},
                {options.wide, options.legend});
  report.add_meta("options", options.given);
  // Costs that are not measured stay assumed.
  ring::CostModel measured = ring::CostModel::for_place(device->place());
  measured.source = source_text(mesh, device->place(), threads);
  measured.threads = threads;
  std::optional<ring::CostModel> known;
  const std::string shown = "--calibrate " + options.calibrate;
  std::optional<files::TextFile> file;
  std::optional<ReportFiles> report_files;
  collectively(world, [&] {
    if (mesh.rank() != 0) return;
    as_option(shown, [&] {
      known = read_known(options.calibrate, measured.source, device->place());
      file.emplace(options.calibrate);
    });
    report_files.emplace(options.json, options.csv, report);
  });
  const std::int64_t longest = std::max(extent.rows.end, extent.call_rows);
  {
    Clock clock(options, world, device->place());
    {
      const auto blocks = collectively(world, [&] {
        return std::make_unique<KernelBlocks>(options, longest, *device, mesh.watchdog(), threads);
      });
      measure_kernels(measured, *blocks, extent, how_text(context, device->place()), clock, world,
                      report);
    }
    measure_memory(measured, *device, mesh.watchdog(), threads, clock, world, report);
  }
  measure_transports(measured, context, mesh, *device, extent.hop_bytes, report);
  collectively(world, [&] {
    if (!file) return;
    report.add_meta("source", measured.source);
    report.add_meta("transport", measured.transport);
    add_rows(report, measured);
    if (known) {
      // Without a named transport, the model holds the preferred one.
      known->refresh(measured, options.transport == Transport::automatic);
    } else {
      known = std::move(measured);
    }
    report.add_meta("file holds", classes_text(*known));
    report.add_meta("assumed", fmt::format("{}", fmt::join(known->assumed, ", ")));
    as_option(shown, [&] { file->commit(ring::to_json(*known) + "\n"); });
    if (!report_files->replace_table()) report.write_table(context.out);
    report_files->write(report, context.out);
  });
  return ExitCode::success;
}

}  // namespace annulus::launcher
