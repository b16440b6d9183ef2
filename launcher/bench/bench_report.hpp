#pragma once

#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/accuracy.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/verification/comparison.hpp>

#include "launcher/bench/timing.hpp"
#include "launcher/options/command_context.hpp"
#include "launcher/report/report.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {

/// Measurements of one pass of a case, over all ranks; the same on every rank.
struct PassMeasurement {
  Timing time;
  double local = 0;              ///< seconds of the kernels alone, median; 0: not measured
  double flops = 0;              ///< of the whole problem
  double bytes = 0;              ///< received by the rank that receives most
  double exposed = 0;            ///< seconds per call, of the rank that waits longest
  std::optional<double> hidden;  ///< share of the transfer time under kernels
  double bookkeeping = 0;        ///< largest share of a rank's time
  double peak_memory = 0;        ///< bytes, of the rank with most
  double extra_memory = 0;       ///< likewise
  std::string implementations;   ///< see Attention::implementations_of_ranks()
  /// Seconds of a call where bits may depend on the number of ranks, median; if they must not.
  std::optional<double> unrestricted;
};

struct BackwardMeasurement : PassMeasurement {
  ring::ScheduleChoice schedule;
  bool adds_rounded = false;   ///< see ring::RankPlan::adds_rounded_gradients()
  std::optional<Timing> both;  ///< of a forward and a backward pass, one after the other
};

/// A case: the forward pass, and the backward pass if it was asked for.
struct BenchMeasurement : PassMeasurement {
  verification::Accuracy accuracy;
  AccuracyBound bound;
  std::optional<BackwardMeasurement> backward;
};

/// The report of annulus bench, without rows.
[[nodiscard]] Report make_bench_report(const CommandContext& context, const Mesh& mesh, Place place,
                                       int threads);
/// A row as wide as any row of these cases may be. It lays out the table before there is a row.
[[nodiscard]] Row typical_bench_row(const Report& report, const std::vector<AttentionShape>& shapes,
                                    Place place);
void add_bench_row(Report& report, const ProblemSetup& setup, const Attention& attention,
                   const BenchMeasurement& measured, int ranks);

}  // namespace annulus::launcher
