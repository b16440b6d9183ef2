#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/ring/plan.hpp>
#include <annulus/verification/verification.hpp>

namespace annulus::launcher {

/// Counts the features of random problems, to show what a run has not tried.
class Coverage {
 public:
  /// Adds a drawn problem and the schedule that computed it.
  void add(const verification::ShardedCase& sharded, std::string_view schedule);
  /// Adds the backward pass of an added problem.
  void add_backward(std::string_view schedule, const ring::BackwardRequest& request);

  /// Lines of a report: "masks by position" → "causal masks 81, windows 40, …". Features that never
  /// occurred are listed with 0. Of the pairs of features that never occurred, the first two are
  /// named.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> lines() const;

 private:
  using Counts = std::map<std::string, int>;
  Counts parts_;  // mask parts and modifiers
  std::map<std::pair<std::string, std::string>, int> pairs_;
  Counts layouts_;
  Counts dtypes_;
  Counts schedules_;
  Counts with_rows_;         // schedules, of problems whose bias or dense mask differs by row
  Counts backward_;          // schedules
  Counts without_backward_;  // kinds of problems
  int gradients_of_lse_ = 0;
  int added_gradients_ = 0;
  int other_for_keys_ = 0;  // layouts of keys that differ from the queries'
  int wide_softmax_ = 0;    // in float64
  int non_finite_columns_ = 0;
  int non_finite_queries_ = 0;
};

}  // namespace annulus::launcher
