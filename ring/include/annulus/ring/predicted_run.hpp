#pragma once

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/mesh/transport.hpp>
#include <annulus/ring/planner.hpp>

namespace annulus::ring {

/// The size of the largest mesh of which all ranks are simulated.
inline constexpr int kAllSimulated = 512;
/// The most ranks that stand for a larger mesh.
inline constexpr int kSampledRanks = 24;
/// The time of all ranks may be this factor longer or shorter than that of a sample.
inline constexpr double kSampleError = 1.15;

/// The ranks that every prediction simulates, in ascending order. In a mesh of up to `all` ranks,
/// they are all ranks. In a larger mesh, they are at most `most`: the rank with most work, and
/// others spread over the mesh. If ranks are on several nodes, they are all ranks of some nodes,
/// unless a node has more than `most`. See Simulation about ranks that are left out.
[[nodiscard]] std::vector<int> simulated_ranks(const PlanInput& input, int all = kAllSimulated,
                                               int most = kSampledRanks);

/// Predicts runs of one problem, laid out in one way: its variants, in any order. All predictions
/// come from here, so the same plan always has the same predicted time.
class Predictor {
 public:
  /// The problem and the operands of `input` must outlive it.
  explicit Predictor(const PlanInput& input);
  /// The same with these ranks instead of simulated_ranks().
  Predictor(const PlanInput& input, std::vector<int> ranks);
  ~Predictor();
  Predictor(const Predictor&) = delete;
  Predictor& operator=(const Predictor&) = delete;

  [[nodiscard]] const std::vector<int>& ranks() const noexcept;

  /// Lower bounds of time and memory, from the plan of the rank with most work. `input` has the
  /// same problem, operands and nodes, and the options of the variant (with_variant()). Throws
  /// UnsupportedError when kernels refuse its blocks.
  [[nodiscard]] PredictedRun least(const PlanInput& input, const ScheduleVariant& variant);
  /// A rough prediction, by which the most promising variants are simulated first. If all ranks of
  /// a large mesh would be simulated, it is the run of a sample of them; otherwise it is `least`.
  /// The time is infinite if the sample takes more than kSampleError times `limit` seconds.
  [[nodiscard]] PredictedRun estimate(const PlanInput& input, const ScheduleVariant& variant,
                                      const PredictedRun& least, double limit);
  /// The run of a variant; nothing as soon as it is certain to take more than `limit` seconds.
  [[nodiscard]] std::optional<PredictedRun> run(
      const PlanInput& input, const ScheduleVariant& variant,
      double limit = std::numeric_limits<double>::infinity());

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The run of one variant.
[[nodiscard]] PredictedRun predict_run(const PlanInput& input, const ScheduleVariant& variant);

/// "0.505 ms", "926 ms" or "7372 ms": three digits, or more before the point.
[[nodiscard]] std::string milliseconds_text(double seconds);

/// If the model's transport stays inside a node, and ranks are on several (see Prices; empty: one
/// node), sets the transport that such ranks take. Throws ArgumentError("transport", …) if the
/// caller named the transport.
void settle_transport(CostModel& model, Transport asked, const NamedSharding& key,
                      const std::vector<int>& node_of_rank);

}  // namespace annulus::ring
