#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include <annulus/attention/registry.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/prices.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// Adds lines of --explain about one pass to a report. The names of the lines begin with `prefix`:
/// nothing, or "backward ".
class Explanation {
 public:
  explicit Explanation(Report& report, std::string prefix = {})
      : report_(report), prefix_(std::move(prefix)) {}

  /// The schedule and why, then why others were passed over.
  void add(const ring::ScheduleChoice& choice);
  /// The same, and the implementation.
  void add(const Selection& selection, const ring::ScheduleChoice& choice);
  /// The sources of predictions.
  void add(const ring::Prices& prices);
  /// All of these, and the link of the tuning chain that decided.
  void add(const Selection& selection, const ring::ScheduleChoice& choice,
           const ring::Decision& decision, const ring::Prices& prices);
  void add(const ring::ShardedAttention& pass);

 private:
  void add(const ring::Decision& decision);
  void add_line(const std::string& name, const std::string& value) {
    report_.add_meta(prefix_ + name, value);
  }

  Report& report_;
  std::string prefix_;
};
/// Adds the lines of both passes; the backward pass may be null.
void explain(const Attention& attention, const ring::ShardedAttention* backward, Report& report);

/// Measured seconds of a call whose bits are the same on any number of ranks, and of one whose bits
/// need not be.
struct MeasuredPrice {
  double seconds = 0;
  double unrestricted = 0;
};

/// For a problem whose bits must be the same on any number of ranks: adds the predicted time of the
/// schedule, and of the one that would be taken otherwise; also their measured times, if there are
/// any. `pass`: "forward" or "backward".
void add_price_of_order(const ring::ScheduleChoice& choice, std::string_view pass, Report& report,
                        const std::optional<MeasuredPrice>& measured = {});

/// Says so if this rank adds parts of gradients that were rounded for sending.
void add_rounding(const ring::ShardedAttention& backward, Report& report);

/// Logs what was chosen and why: the main steps on rank 0 (info), and each rank's shards (debug).
/// Collective over the mesh.
void log_choices(const AttentionProblem& problem, const Attention& attention, const Mesh& mesh);

/// A plan as "# " lines, with the steps of the first `ranks` ranks.
void print_plan(const ring::Plan& plan, int ranks, std::ostream& out);

}  // namespace annulus::launcher
