#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>

#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/first_ranks.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/verification/device_tensors.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/bench/timing.hpp"
#include "launcher/commands/commands.hpp"
#include "launcher/planning/scaling.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// Median seconds on these ranks. Collective over them.
void measure(ScalingPoint& point, const Options& options, Context& ranks) {
  Mesh& mesh = ranks.mesh();
  Device& device = ranks.device();
  Control& world = mesh.world();
  const ProblemSetup setup =
      settled_problem(on_mesh(options, fmt::format("{}={}", options.sequence_axis, mesh.size())),
                      point.shape, options.dtype.value_or(DType::float32), ranks);
  Attention attention(ranks, setup.problem);
  if (mesh.rank() == 0) print_warnings(attention.decision().warnings);
  const verification::CaseShards shards = collectively(world, [&] {
    const Computing computing = world.computing();
    return verification::CaseShards(attention.operands(), setup.problem.dtype, options.seed,
                                    mesh.rank(), device.staging(), ranks.threads(), setup.fills,
                                    setup.problem.normalize_output);
  });
  verification::DeviceTensors moved = collectively(world, [&] {
    return verification::DeviceTensors(shards.local_tensors(), device, mesh.watchdog());
  });
  moved.upload();
  const auto call = [&] { attention.run_and_wait(moved.tensors()); };
  Rest rest(device.place());
  const Timing time = rest.before([&] {
    for (int i = 0; i < options.warmup; ++i) call();
    return time_calls(options.iterations, world, call);
  });
  point.nodes = mesh.topology().nodes();
  point.schedule = ring::name_of(attention.schedule().schedule);
  point.seconds = time.median;
  point.flops = forward_flops(point.shape, visible_pairs(setup.problem));
}

// Collective over the job; complete on rank 0.
ScalingPoint measure_point(const CommandContext& context, Context& everyone, int ranks, bool weak) {
  const Options& options = context.options;
  ScalingPoint point;
  point.weak = weak;
  point.ranks = ranks;
  point.shape = scaled_shape(options, ranks, everyone.size(), weak);
  begin_step(fmt::format("annulus bench was timing {} on {}", to_string(point.shape),
                         counted(ranks, "rank")));
  const Communicator part = first_ranks(context.session.world(), ranks,
                                        Watchdog(Watchdog::Seconds(options.timeout)), print_error);
  collectively(everyone.mesh().world(), [&] {
    if (everyone.rank() >= ranks) return;
    // The other ranks wait, so `some` shares the base that sends them heartbeats.
    Context some(part.get(), MeshShape({{options.sequence_axis, ranks}}), everyone);
    measure(point, options, some);
  });
  return point;
}

}  // namespace

ExitCode bench_scaling(const CommandContext& context) {
  const Options& options = context.options;
  if (!options.shape) {
    throw ArgumentError("--shape", "nothing", "B,T,S,N,K,D or B,T,S,N,K,D,Dv");
  }
  const std::unique_ptr<Context> opened =
      open_context(context, MeshShape({{options.sequence_axis, context.session.size()}}));
  Mesh& everyone = opened->mesh();
  const std::string problem =
      collectively(everyone.world(), [&] { return problem_text(scaled_problem(options)); });
  Report report =
      make_scaling_report("bench.scaling", "ms, median", options, problem,
                          make_record(context, everyone, opened->place(), opened->threads()));
  add_rank_order(report, context.session);
  std::optional<ReportFiles> files;
  collectively(everyone.world(), [&] {
    if (everyone.rank() == 0) files.emplace(options.json, options.csv, report);
  });
  // Nodes of different sizes count as one.
  const int nodes = everyone.topology().nodes();
  const int ranks_per_node = everyone.size() % nodes == 0 ? everyone.size() / nodes : 0;
  std::vector<ScalingPoint> points;
  for (const bool weak : {false, true}) {
    for (const int ranks : scaling_ranks(everyone.size(), ranks_per_node)) {
      points.push_back(measure_point(context, *opened, ranks, weak));
    }
  }
  collectively(everyone.world(), [&] {
    if (!files) return;
    set_efficiencies(points);
    for (const ScalingPoint& point : points) report.add_row(scaling_row(point));
    if (!files->replace_table()) report.write_table(context.out);
    files->write(report, context.out);
  });
  return ExitCode::success;
}

}  // namespace annulus::launcher
