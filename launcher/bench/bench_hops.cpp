#include "launcher/bench/bench_hops.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/give_up_on_error.hpp>
#include <annulus/mesh/transport.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;
constexpr SweepRange kDefaultSizes{64 << 10, 256 << 20, 4};
// Each timing covers several hops in a row, so that starting and waiting hardly count: as many as
// move this many bytes, up to a limit.
constexpr std::int64_t kBytesPerTime = 64 << 20;
constexpr std::int64_t kMaximumHopsPerTime = 16;

// Sends to the next rank and receives from the one before, over and over.
class RingHop {
 public:
  RingHop(Group& group, Stream& stream, const Buffer& send, const Buffer& receive,
          std::int64_t bytes)
      : group_(group),
        stream_(stream),
        bytes_(bytes),
        repeats_(std::clamp<std::int64_t>(kBytesPerTime / bytes, 1, kMaximumHopsPerTime)),
        next_((group.rank() + 1) % group.size()),
        before_((group.rank() + group.size() - 1) % group.size()) {
    const auto size = static_cast<std::size_t>(bytes);
    exchange_ = group.prepare({{next_, send.data(), size}}, {{before_, receive.data(), size}},
                              {"hop", /*step=*/-1});
  }

  [[nodiscard]] Timing time(int warmup, int iterations, Control& world) {
    for (int i = 0; i < warmup; ++i) run();
    Timing timing = time_calls(iterations, world, [this] { run(); });
    const auto repeats = static_cast<double>(repeats_);
    return {timing.least / repeats, timing.median / repeats, timing.p99 / repeats,
            timing.most / repeats};
  }

 private:
  void run() {
    for (std::int64_t i = 0; i < repeats_; ++i) exchange_->post(stream_);
    Waiting waiting;
    waiting.check = [this] { group_.check(); };
    waiting.describe = [this] {
      return fmt::format("hop: waiting for {} bytes from rank {}, or for rank {} to take as many",
                         bytes_, before_, next_);
    };
    stream_.synchronize(waiting);
  }

  Group& group_;
  Stream& stream_;
  std::int64_t bytes_;
  std::int64_t repeats_;
  int next_;
  int before_;
  std::unique_ptr<PreparedExchange> exchange_;
};

void measure(TransportHops& found, Group& group, Mesh& mesh, Device& device,
             const SweepRange& sizes, int warmup, int iterations) {
  MemoryPool& memory = group.exchange_memory(device.memory());
  const auto largest = static_cast<std::size_t>(sizes.end);
  const auto buffers = collectively(mesh.world(), [&] {
    return std::pair(memory.allocate(largest, "messages"), memory.allocate(largest, "messages"));
  });
  const std::unique_ptr<Stream> stream =
      device.make_stream("communication", mesh.watchdog(), nullptr);
  const GiveUpOnError guard(group);
  for (std::int64_t bytes = sizes.begin; bytes <= sizes.end; bytes *= sizes.factor) {
    RingHop hop(group, *stream, buffers.first, buffers.second, bytes);
    found.hops.push_back({bytes, hop.time(warmup, iterations, mesh.world())});
  }
}

// Includes impossible transports, since the report says why; omits composite where it would be peer
// or NCCL.
std::vector<Transport> transports_to_measure(Mesh& mesh, const AxisNames& axes, Place place,
                                             Transport asked) {
  if (asked != Transport::automatic) return {asked};
  std::vector<Transport> transports = device_transports();
  const std::vector<Transport> different = mesh.transports(axes, place);
  if (std::find(different.begin(), different.end(), Transport::composite) == different.end()) {
    std::erase(transports, Transport::composite);
  }
  return transports;
}

double gigabytes_per_second(const TransportHops::Hop& hop, double seconds) {
  return static_cast<double>(hop.bytes) / seconds * 1e-9;
}

std::string crossover_text(const TransportHops& a, const TransportHops& b) {
  const ring::CostCurve first = a.curve();
  const ring::CostCurve second = b.curve();
  const bool b_wins = ring::crossover(first, second) >= 0;
  const double size = b_wins ? ring::crossover(first, second) : ring::crossover(second, first);
  const std::string verdict = fmt::format("{} is no slower than {}", (b_wins ? b : a).transport,
                                          (b_wins ? a : b).transport);
  if (size <= static_cast<double>(a.hops.front().bytes)) return verdict + " at every size";
  return fmt::format("{} from {:.3f} MiB on", verdict, size / kMiB);
}

Report make_report(const CommandContext& context, const Mesh& mesh, Place place) {
  const Options& options = context.options;
  Report report(
      "bench.hops", make_record(context, mesh, place, /*threads=*/1),
      {{"mesh", "", 0, 1},
       {"transport", "", 9},
       {"size", "bytes", 12, 0,
        "that every rank sends to the next and receives from the one before"},
       {"time", "µs, median", 10, 0,
        fmt::format("of {} after {} to warm up, each the mean of up to {} hops in a row; of the "
                    "slowest rank",
                    counted(options.iterations, "time"), options.warmup, kMaximumHopsPerTime)},
       {"least", "µs", 10},
       {"most", "µs", 10},
       {"rate", "GB/s each way", 13}},
      {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("mesh",
                  fmt::format("{}: {} on {}", to_string(mesh.shape()), counted(mesh.size(), "rank"),
                              counted(mesh.topology().nodes(), "node")));
  add_rank_order(report, context.session);
  return report;
}

void add_rows(Report& report, const std::vector<TransportHops>& all, const Mesh& mesh) {
  const auto microseconds = [](double seconds) { return fmt::format("{:.2f}", seconds * 1e6); };
  for (const TransportHops& one : all) {
    for (const TransportHops::Hop& hop : one.hops) {
      report.add_row({mesh_cell(mesh.shape()), one.transport, std::to_string(hop.bytes),
                      microseconds(hop.time.median), microseconds(hop.time.least),
                      microseconds(hop.time.most),
                      fmt::format("{:.2f}", gigabytes_per_second(hop, hop.time.median))});
    }
  }
}

void add_findings(Report& report, const std::vector<TransportHops>& all) {
  const TransportHops* before = nullptr;
  for (const TransportHops& one : all) {
    if (!one.skipped.empty()) {
      report.add_meta(one.transport + " skipped", one.skipped);
      continue;
    }
    if (before != nullptr) report.add_meta("crossover", crossover_text(*before, one));
    before = &one;
  }
}

}  // namespace

ring::CostCurve TransportHops::curve() const {
  std::vector<ring::CostCurve::Point> points;
  points.reserve(hops.size());
  for (const Hop& hop : hops) {
    points.push_back({static_cast<double>(hop.bytes), hop.time.median});
  }
  return {std::move(points), "hops"};
}

AxisNames all_axes(const Mesh& mesh) {
  AxisNames names;
  for (const MeshAxis& axis : mesh.shape().axes()) names.push_back(axis.name);
  return names;
}

std::vector<TransportHops> measure_hops(Mesh& mesh, const AxisNames& axes, Device& device,
                                        Transport asked, const SweepRange& sizes, int warmup,
                                        int iterations) {
  if (mesh.group(axes).size() < 2) {
    throw ArgumentError("ring hops", "1 rank", "2 or more, under mpirun");
  }
  std::vector<TransportHops> all;
  if (device.place().is_host()) {
    Group& group = mesh.group(axes);
    measure(all.emplace_back(TransportHops{group.transport(), {}, {}}), group, mesh, device, sizes,
            warmup, iterations);
    return all;
  }
  for (const Transport transport : transports_to_measure(mesh, axes, device.place(), asked)) {
    TransportHops& found = all.emplace_back(TransportHops{std::string(name_of(transport)), {}, {}});
    Group* group = nullptr;
    try {
      group = &mesh.group(axes, device.place(), transport);
    } catch (const UserError& error) {
      found.skipped = error.what();
      continue;
    }
    measure(found, *group, mesh, device, sizes, warmup, iterations);
  }
  return all;
}

ExitCode bench_hops(const CommandContext& context) {
  const Options& options = context.options;
  if (context.session.size() < 2)
    throw ArgumentError("--hops", "1 rank", "2 or more, under mpirun");
  begin_step("annulus bench was timing hops");
  const std::unique_ptr<Context> ranks = open_context(context);
  Mesh& mesh = ranks->mesh();
  Report report = make_report(context, mesh, ranks->place());
  std::optional<ReportFiles> files;
  collectively(mesh.world(), [&] {
    if (mesh.rank() == 0) files.emplace(options.json, options.csv, report);
  });
  const std::vector<TransportHops> all = measure_hops(
      mesh, all_axes(mesh), ranks->device(), options.transport,
      options.sequence_sweep.value_or(kDefaultSizes), options.warmup, options.iterations);
  collectively(mesh.world(), [&] {
    if (!files) return;
    add_findings(report, all);
    add_rows(report, all, mesh);
    if (!files->replace_table()) report.write_table(context.out);
    files->write(report, context.out);
  });
  return ExitCode::success;
}

}  // namespace annulus::launcher
