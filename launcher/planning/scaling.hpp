#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/registry.hpp>

#include "launcher/options/options.hpp"
#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// A point of a scaling study: one number of ranks.
struct ScalingPoint {
  bool weak = false;  ///< the sequence grows with the ranks
  int ranks = 1;
  int nodes = 1;
  AttentionShape shape;
  std::string schedule;
  std::string transport;  ///< of a prediction
  double seconds = 0;
  double flops = 0;  ///< of the whole problem
  /// Rate per rank over that of one rank; none without operations. See set_efficiencies().
  std::optional<double> efficiency = {};

  /// None if there is nothing to compute.
  [[nodiscard]] std::optional<double> rate_per_rank() const {
    return seconds > 0 ? std::optional(flops / seconds / ranks) : std::nullopt;
  }
};

/// The shape of a point. Strong: the shape of the options. Weak: --tokens-per-rank keys per rank,
/// by default as in the largest strong point, and queries in proportion.
[[nodiscard]] AttentionShape scaled_shape(const Options& options, int ranks, int most_ranks,
                                          bool weak);
/// 1, 2, 4, … on one node, then all ranks of 1, 2, 4, … nodes, and `most`. `ranks_per_node`: 0 if
/// all are on one.
[[nodiscard]] std::vector<int> scaling_ranks(int most, int ranks_per_node);
/// Sets the efficiency of strong and weak points, each relative to the first of its kind.
void set_efficiencies(std::vector<ScalingPoint>& points);

/// The problem of the options' shape. Needs --shape; throws UserErrors.
[[nodiscard]] AttentionProblem scaled_problem(const Options& options);
/// `problem`: problem_text() of scaled_problem().
[[nodiscard]] Report make_scaling_report(const char* command, const char* time_unit,
                                         const Options& options, const std::string& problem,
                                         Record record = {});
[[nodiscard]] Row scaling_row(const ScalingPoint& point);

/// annulus plan --scaling: predicts 1, 2, 4, … up to --ranks ranks. Writes a table to `out`, and
/// the files that the options name. Not collective. Throws UserErrors.
void predict_scaling(const Options& options, const Registry& registry, std::ostream& out);

}  // namespace annulus::launcher
