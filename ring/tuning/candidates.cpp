#include "tuning/candidates.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

// Groups of a quarter and of four times the default size, and all heads at once.
constexpr std::array<std::int64_t, 3> kOtherGroups{
    kDefaultHeadGroupBytes / 4, kDefaultHeadGroupBytes * 4, std::int64_t{1} << 62};

/// Makes plans and keeps the new ones.
class Search {
 public:
  Search(const PlanInput& input, std::string schedule)
      : input_(input), schedule_(std::move(schedule)), predictor_(input) {}

  void add(const Choice& choice) {
    TunedCandidate candidate{choice};
    const PlanInput input = with_choice(input_, choice);
    const std::string& name = choice.schedule.empty() ? schedule_ : choice.schedule;
    candidate.reason = obstacle_of(choice, input_, name);
    if (!candidate.reason.empty()) {
      impossible_.push_back(std::move(candidate));
      return;
    }
    const Schedule schedule = parse_schedule(name);
    try {
      candidate.predicted = predictor_.run(input, {schedule})->seconds;
    } catch (const UnsupportedError& error) {
      candidate.reason = error.what();
      impossible_.push_back(std::move(candidate));
      return;
    }
    const auto identity = std::tuple(schedule, choice.transport, candidate.predicted);
    if (seen_.insert(identity).second) possible_.push_back(std::move(candidate));
  }

  [[nodiscard]] const std::vector<TunedCandidate>& possible() const { return possible_; }
  [[nodiscard]] const std::vector<TunedCandidate>& impossible() const { return impossible_; }

 private:
  const PlanInput& input_;
  std::string schedule_;
  Predictor predictor_;
  std::set<std::tuple<Schedule, Transport, double>> seen_;
  std::vector<TunedCandidate> possible_, impossible_;
};

// The choices of a variant that the chain may make.
Choice choice_of(const ScheduleVariant& variant, const OpenChoices& open) {
  Choice choice;
  if (open.schedule) choice.schedule = name_of(variant.schedule);
  if (open.ulysses_degree) choice.ulysses_degree = variant.ulysses_degree;
  if (open.inner_size) choice.inner_size = variant.inner_size;
  return choice;
}

// The choice of heuristics first, then the best of each schedule, then the others.
std::vector<TunedCandidate> in_order(std::vector<TunedCandidate> candidates,
                                     const Choice& defaults) {
  std::stable_sort(
      candidates.begin(), candidates.end(),
      [](const TunedCandidate& a, const TunedCandidate& b) { return a.predicted < b.predicted; });
  std::vector<TunedCandidate> first, best, others;
  std::set<std::string> schedules;
  for (TunedCandidate& one : candidates) {
    const bool is_best = schedules.insert(one.choice.schedule).second;
    (one.choice == defaults ? first : is_best ? best : others).push_back(std::move(one));
  }
  first.insert(first.end(), best.begin(), best.end());
  first.insert(first.end(), others.begin(), others.end());
  return first;
}

}  // namespace

std::vector<TunedCandidate> tuning_candidates(const PlanInput& input, const OpenChoices& open,
                                              const std::string& schedule,
                                              const std::vector<Transport>& transports,
                                              const TuningOptions& limits) {
  Search search(input, schedule == "auto" ? "local" : schedule);
  const std::vector<Transport> ways =
      open.transport ? transports : std::vector{Transport::automatic};
  // The plan that is made without a chain.
  Choice defaults;
  if (obstacle_of(defaults, input, schedule).empty()) {
    defaults = choice_of(choose_schedule(input, schedule), open);
  }
  defaults.transport = ways.front();

  const auto add = [&](Choice choice) {
    for (const Transport transport : ways) {
      choice.transport = transport;
      search.add(choice);
    }
  };
  add(defaults);
  for (const ConsideredVariant& one : variants_for(input, schedule)) {
    if (one.is_open()) add(choice_of(one.variant, open));
  }
  // Adds variants of candidates that are fast enough.
  double best = std::numeric_limits<double>::infinity();
  for (const TunedCandidate& one : search.possible()) best = std::min(best, one.predicted);
  const auto hopeful = [&](const TunedCandidate& one) {
    return one.predicted <= best * limits.factor;
  };
  const std::vector<TunedCandidate> plain = search.possible();
  for (const TunedCandidate& one : plain) {
    if (!hopeful(one)) continue;
    const std::string& name = one.choice.schedule.empty() ? schedule : one.choice.schedule;
    if (open.head_groups && (name == "ulysses" || name == "hybrid")) {
      for (const std::int64_t bytes : kOtherGroups) {
        Choice choice = one.choice;
        choice.head_group_bytes = bytes;
        search.add(choice);
      }
    }
    if (!open.implementation) continue;
    for (const Implementation* candidate : input.candidates) {
      Choice choice = one.choice;
      choice.implementation = candidate->names().front();
      search.add(choice);
    }
  }

  std::vector<TunedCandidate> candidates = in_order(search.possible(), defaults);
  best = std::numeric_limits<double>::infinity();
  for (const TunedCandidate& one : candidates) best = std::min(best, one.predicted);
  int taken = 0;
  for (TunedCandidate& one : candidates) {
    if (!hopeful(one) && !(one.choice == defaults)) {
      one.reason =
          fmt::format("predicted {} against {}, more than {} times",
                      milliseconds_text(one.predicted), milliseconds_text(best), limits.factor);
    } else if (taken == limits.candidates) {
      one.reason = fmt::format("only {} are timed", limits.candidates);
    } else {
      ++taken;
    }
  }
  std::stable_partition(candidates.begin(), candidates.end(),
                        [](const TunedCandidate& one) { return one.reason.empty(); });
  candidates.insert(candidates.end(), search.impossible().begin(), search.impossible().end());
  return candidates;
}

std::string obstacle_of(const Choice& choice, const PlanInput& input, const std::string& schedule) {
  const auto& candidates = input.candidates;
  const bool known =
      choice.implementation.empty() ||
      std::any_of(candidates.begin(), candidates.end(), [&](const Implementation* candidate) {
        return candidate->names().front() == choice.implementation;
      });
  if (!known) {
    return fmt::format("implementation {} cannot run", choice.implementation);
  }
  if (!choice.schedule.empty() && schedule != "auto" && choice.schedule != schedule) {
    return fmt::format("schedule {} is not {}", choice.schedule, schedule);
  }
  const std::string& name = choice.schedule.empty() ? schedule : choice.schedule;
  if (name == "auto") return {};
  return entry_of(parse_schedule(name)).obstacle(with_choice(input, choice));
}

}  // namespace annulus::ring
