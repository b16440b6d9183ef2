#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "planner/kv_groups.hpp"
#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

// Predictions that differ by less count as equal.
constexpr double kNoise = 1.01;

/// A variant in the comparison.
struct Candidate {
  ScheduleVariant variant;
  PlanInput input;
  std::string refused = {};  // why no kernel computes it; empty if one does
  double least = 0;          // seconds; see Predictor::least()
  double estimate = 0;       // seconds; see Predictor::estimate()
  bool played = false;       // simulated
  double seconds = 0;        // predicted, if it was simulated
  double bytes = 0;  // of buffers, of the rank with most; a lower bound until it is simulated
};

/// Why no variant can run. Variants with the same reason are named together.
class Refusals {
 public:
  void add(const ScheduleVariant& variant, const std::string& reason) {
    const auto same = std::ranges::find(all_, reason, &OneReason::text);
    OneReason& one = same != all_.end() ? *same : all_.emplace_back(OneReason{reason, {}});
    one.variants.push_back(variant_text(variant));
  }
  [[nodiscard]] std::string text() const {
    std::string text = "no schedule can run";
    for (const OneReason& one : all_) {
      text += fmt::format("; {}: {}", fmt::join(one.variants, ", "), one.text);
    }
    return text;
  }

 private:
  struct OneReason {
    std::string text;
    std::vector<std::string> variants;
  };
  std::vector<OneReason> all_;
};

/// Finds the best of several variants, simulating as few of them as possible.
class Comparison {
 public:
  explicit Comparison(const PlanInput& input) : predictor_(input) {}

  void add(const PlanInput& input, const ScheduleVariant& variant) {
    Candidate one{variant, with_variant(input, variant)};
    unless_refused(one, [&] {
      const PredictedRun least = predictor_.least(one.input, variant);
      one.least = least.seconds;
      one.bytes = least.buffer_bytes;
    });
    candidates_.push_back(std::move(one));
  }

  /// Throws UnsupportedError if kernels refuse all.
  [[nodiscard]] ScheduleChoice choose() {
    std::vector<Candidate*> hopeful;
    for (Candidate& one : candidates_) {
      if (one.refused.empty()) hopeful.push_back(&one);
    }
    std::stable_sort(hopeful.begin(), hopeful.end(),
                     [](const Candidate* a, const Candidate* b) { return a->least < b->least; });
    estimate(hopeful);
    const Candidate* best = nullptr;
    // Each simulation may rule out others, so every round begins with the most hopeful one left.
    const auto undecided = [&](const Candidate* one) {
      return !one->played && one->refused.empty() && !is_passed_over(*one, best);
    };
    for (auto next = std::ranges::find_if(hopeful, undecided); next != hopeful.end();
         next = std::ranges::find_if(hopeful, undecided)) {
      unless_refused(**next, [&] { play(**next); });
      best = best_of_played();
    }
    if (best == nullptr) throw UnsupportedError(refusals());
    ScheduleChoice choice{best->variant, best->seconds, {}};
    for (const Candidate& one : candidates_) {
      if (&one == best) continue;
      choice.passed_over.push_back({one.variant, why_not(one, *best), one.seconds});
    }
    return choice;
  }

 private:
  // Refusals are kept per variant: a kernel may take the blocks of some variants only.
  template <class Step>
  static void unless_refused(Candidate& one, const Step& step) {
    try {
      step();
    } catch (const UnsupportedError& error) {
      one.refused = error.what();
    }
  }

  // The error text if all are refused.
  [[nodiscard]] std::string refusals() const {
    const std::string& first = candidates_.front().refused;
    const char* const remedy =
        candidates_.front().input.problem.in_global_order()
            ? "; --reproducible world wants whole sequences on a rank: batch or heads sharded (for "
              "gradients, at most one rank for each key/value head), schedule ulysses, or "
              "allgather "
              "with layout contiguous and granule 256 (384 on GPUs for value dimensions up to 64); "
              "--reproducible run has no such limits"
            : "";
    const auto same = [&](const Candidate& one) { return one.refused == first; };
    if (std::all_of(candidates_.begin(), candidates_.end(), same)) {
      const bool named = candidates_.size() == 1;
      return (named ? fmt::format("schedule {}: ", variant_text(candidates_.front().variant))
                    : "") +
             first + remedy;
    }
    Refusals all;
    for (const Candidate& one : candidates_) all.add(one.variant, one.refused);
    return all.text() + remedy;
  }

  // Puts the most hopeful ones first; variants that lose by the sample come last, in case kernels
  // refuse all others.
  void estimate(std::vector<Candidate*>& hopeful) {
    double limit = std::numeric_limits<double>::infinity();
    for (Candidate* one : hopeful) {
      unless_refused(*one, [&] {
        PredictedRun least;
        least.seconds = one->least;
        one->estimate = predictor_.estimate(one->input, one->variant, least, limit).seconds;
        if (std::isinf(one->estimate)) one->least = std::max(one->least, limit);
        limit = std::min(limit, one->estimate * kSampleError * kNoise);
      });
    }
    std::stable_sort(hopeful.begin(), hopeful.end(), [](const Candidate* a, const Candidate* b) {
      return a->estimate < b->estimate;
    });
  }

  // A variant that takes longer than the limit is not simulated to the end: it cannot win.
  void play(Candidate& one) {
    const double limit = fastest_ * kNoise;
    const std::optional<PredictedRun> run = predictor_.run(one.input, one.variant, limit);
    if (!run) {
      // Above the limit even if that is 0: otherwise the variant would stay undecided for ever.
      one.least =
          std::max(one.least, std::nextafter(limit, std::numeric_limits<double>::infinity()));
      return;
    }
    one.played = true;
    one.seconds = run->seconds;
    one.bytes = run->buffer_bytes;
    fastest_ = std::min(fastest_, one.seconds);
  }

  [[nodiscard]] bool is_as_fast(const Candidate& one) const {
    return one.seconds <= fastest_ * kNoise;
  }

  // True if simulating a variant cannot change the choice: it is slower than the fastest so far, or
  // it can at best tie with it and loses every tie with the best so far.
  [[nodiscard]] bool is_passed_over(const Candidate& one, const Candidate* best) const {
    if (best == nullptr) return false;
    const bool loses = one.bytes > best->bytes || (one.bytes == best->bytes && &one > best);
    return one.least > fastest_ * kNoise || (one.least >= fastest_ && loses);
  }

  // Null if none was played.
  [[nodiscard]] const Candidate* best_of_played() const {
    const Candidate* best = nullptr;
    for (const Candidate& one : candidates_) {
      if (!one.played || !is_as_fast(one)) continue;
      if (best == nullptr || one.bytes < best->bytes) best = &one;
    }
    return best;
  }

  [[nodiscard]] std::string why_not(const Candidate& one, const Candidate& best) const {
    if (!one.refused.empty()) return one.refused;
    const double seconds = one.played ? one.seconds : one.least;
    std::string tie;
    if (seconds <= fastest_ * kNoise) {
      tie = fmt::format(
          ", {} tie, in which {} {}", one.played ? "a" : "at best a", variant_text(best.variant),
          one.bytes > best.bytes ? "needs less memory" : "is as good and comes first");
    }
    return fmt::format("predicted {}{} against {}{} ({})", one.played ? "" : "at least ",
                       milliseconds_text(seconds), milliseconds_text(best.seconds), tie,
                       one.input.prices.model.source);
  }

  Predictor predictor_;
  std::vector<Candidate> candidates_;
  double fastest_ = std::numeric_limits<double>::infinity();  // of the simulated variants
};

}  // namespace

PlanOptions with_variant(PlanOptions options, const ScheduleVariant& variant) {
  if (variant.ulysses_degree != 0) options.ulysses_degree = variant.ulysses_degree;
  if (variant.inner_size != 0) options.inner_size = variant.inner_size;
  return options;
}

PlanInput with_variant(PlanInput input, const ScheduleVariant& variant) {
  input.options = with_variant(input.options, variant);
  return input;
}

std::vector<ConsideredVariant> variants_for(const PlanInput& input, std::string_view name) {
  std::vector<ConsideredVariant> all;
  const auto consider = [&](const ScheduleEntry& entry, const PlanInput& from, auto obstacle) {
    for (const ScheduleVariant& variant : entry.variants(from)) {
      const PlanInput with = with_variant(from, variant);
      ConsideredVariant one{variant, obstacle(entry, with), {}};
      if (one.obstacle.empty()) one.pointless = entry.pointless(with);
      all.push_back(std::move(one));
    }
  };
  if (name == "auto") {
    for (const ScheduleEntry& entry : schedule_table()) consider(entry, input, obstacle_of);
    return all;
  }
  const ScheduleEntry& named = entry_of(parse_schedule(name));
  PlanInput from = input;
  from.options.ulysses_degree = ulysses_degree(input);
  consider(named, from, named_obstacle_of);
  for (ConsideredVariant& one : all) one.pointless.clear();  // it was named
  return all;
}

void check_schedule(const PlanInput& input, std::string_view name) {
  if (name == "auto") return;
  const std::string obstacle = named_obstacle_of(entry_of(parse_schedule(name)), input);
  if (obstacle.empty()) return;
  throw UnsupportedError(fmt::format("schedule {} cannot run: {}", name, obstacle));
}

namespace {

// The choice without the requirement of the same bits on any number of ranks: see
// ScheduleChoice::unrestricted.
ScheduleChoice::Unrestricted best_unrestricted(const PlanInput& input) {
  AttentionProblem problem = input.problem;
  problem.reproducible.reset();
  PlanInput open{problem, input.operands, input.candidates, input.prices, input.options};
  open.backward = input.backward;
  Comparison comparison(open);
  for (const ConsideredVariant& one : variants_for(open, "auto")) {
    if (one.is_open()) comparison.add(open, one.variant);
  }
  const ScheduleChoice best = comparison.choose();
  return {best, best.seconds};
}

}  // namespace

ScheduleChoice choose_schedule(const PlanInput& input, std::string_view name) {
  check_schedule(input, name);
  std::vector<ScheduleVariant> possible;
  std::vector<ScheduleChoice::PassedOver> impossible;
  for (ConsideredVariant& one : variants_for(input, name)) {
    std::string& reason = one.obstacle.empty() ? one.pointless : one.obstacle;
    if (reason.empty()) {
      possible.push_back(one.variant);
    } else {
      impossible.push_back({one.variant, std::move(reason)});
    }
  }
  // A forward pass always has a possible schedule.
  if (possible.empty()) {
    Refusals all;
    for (const auto& one : impossible) all.add(one, one.reason);
    throw UnsupportedError(all.text());
  }
  ScheduleChoice choice{possible.front(), 0, {}};
  const bool global_order = input.problem.in_global_order();
  if (possible.size() > 1 || global_order) {
    Comparison comparison(input);
    for (const ScheduleVariant& variant : possible) comparison.add(input, variant);
    choice = comparison.choose();
  }
  if (global_order) choice.unrestricted = best_unrestricted(input);
  choice.passed_over.insert(choice.passed_over.begin(), impossible.begin(), impossible.end());
  return choice;
}

}  // namespace annulus::ring
