#include "tuning/chain.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <utility>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>

#include "tuning/candidates.hpp"
#include "tuning/file.hpp"
#include "tuning/key.hpp"
#include "tuning/text.hpp"

namespace annulus::ring {
namespace {

// A disk counts as hung after this many timeouts.
constexpr double kDiskTimeouts = 20;

std::string now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

std::size_t timed(const std::vector<TunedCandidate>& candidates) {
  return static_cast<std::size_t>(
      std::count_if(candidates.begin(), candidates.end(),
                    [](const TunedCandidate& one) { return one.reason.empty(); }));
}

std::string reasons(const std::vector<TunedCandidate>& candidates) {
  std::string text;
  for (const TunedCandidate& one : candidates) {
    if (one.reason.empty()) continue;
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", choice_text(one.choice), one.reason);
  }
  return text;
}

}  // namespace

TuningChain::TuningChain(const TunedCall& call, const PlanInput& input, std::string schedule)
    : call_(call),
      input_(input),
      schedule_(std::move(schedule)),
      open_(open_choices(call.options, input, schedule_, call.device.place())),
      file_{call.options.tuning.file.empty() ? default_tuning_file() : call.options.tuning.file,
            !call.options.tuning.file.empty(), call.options.tuning.shown} {}

void TuningChain::pass(DecidedBy link, std::string reason) {
  decision_.passed.push_back({link, std::move(reason)});
}

void TuningChain::answer(DecidedBy link, std::string why) {
  decision_.by = link;
  decision_.why = std::move(why);
  if (link == DecidedBy::heuristics) {
    decision_.choice = {};
    decision_.candidates.clear();
  }
  const Choice& overlay = call_.options.overlay;
  if (!overlay.is_open() && link != DecidedBy::overlay) {
    decision_.why += fmt::format("; an overlay sets {}", choice_text(overlay));
  }
}

// Gives all ranks the decision of rank 0.
void TuningChain::share() {
  Control& control = call_.mesh.world();
  const std::string mine = control.rank() == 0 ? to_json(decision_) : "";
  std::vector<std::string> warnings = std::move(decision_.warnings);
  decision_ = parse_decision(control.broadcast(mine, "tuned choice"));
  decision_.warnings = std::move(warnings);
}

const Decision& TuningChain::decide() {
  const TuningOptions& tuning = call_.options.tuning;
  if (!open_.any()) {
    const bool overlaid = !call_.options.overlay.is_open();
    answer(overlaid ? DecidedBy::overlay : DecidedBy::caller,
           overlaid ? "sets " + choice_text(call_.options.overlay)
                    : "nothing that is left open has more than one answer");
    return decision_;
  }
  if (tuning.policy == TuningPolicy::off) {
    answer(DecidedBy::heuristics, "tuning is off");
    return decision_;
  }
  Control& control = call_.mesh.world();
  if (!key_) {
    const Machine machine =
        machine_of(call_.mesh, call_.device.place(), call_.options.runner.threads);
    key_ = collectively(control, "key of the tuning cache", [&] {
      const Computing computing = control.computing();
      return make_tuning_key(input_, call_.options, schedule_, open_, machine);
    });
  }
  collectively(control, "search of the tuning cache", [&] {
    const Computing computing = control.computing(kDiskTimeouts);
    if (control.rank() != 0) return;
    check_is_cache(file_, tuning.policy == TuningPolicy::measure);
    static_cast<void>(look_up());
  });
  share();
  if (decision_.by != DecidedBy::heuristics) return decision_;
  if (tuning.policy == TuningPolicy::measure && asks(DecidedBy::measurement) && measure()) {
    return decision_;
  }
  answer(DecidedBy::heuristics, "the cost model");
  return decision_;
}

// Runs on rank 0. Leaves "heuristics" if no cache has an answer.
bool TuningChain::look_up() {
  decision_.by = DecidedBy::heuristics;
  TuningCache* const cache = call_.options.tuning.cache;
  if (asks(DecidedBy::memory)) {
    const auto found = cache == nullptr ? std::nullopt : cache->find(*key_);
    if (found && take(*found, DecidedBy::memory, "tuned on " + found->date)) return true;
    if (cache != nullptr && !found) pass(DecidedBy::memory, "has no entry for this problem");
  }
  if (asks(DecidedBy::file)) {
    if (file_.path.empty()) {
      pass(DecidedBy::file, "no file is named, and neither XDG_CACHE_HOME nor HOME is set");
      return false;
    }
    FileAnswer found = find_in_file(file_, *key_);
    decision_.warnings.insert(decision_.warnings.end(), found.warnings.begin(),
                              found.warnings.end());
    if (!found.entry) {
      pass(DecidedBy::file, std::move(found.reason));
    } else if (take(*found.entry, DecidedBy::file,
                    fmt::format("{}, tuned on {}", file_.path, found.entry->date))) {
      if (cache != nullptr) cache->keep(std::move(*found.entry));
      return true;
    }
  }
  return false;
}

bool TuningChain::take(const TuningEntry& entry, DecidedBy link, const std::string& why) {
  const std::string obstacle = obstacle_of(entry.choice, input_, schedule_);
  if (!obstacle.empty()) {
    pass(link,
         fmt::format("its choice, {}, is impossible: {}", choice_text(entry.choice), obstacle));
    return false;
  }
  decision_.choice = entry.choice;
  decision_.candidates = entry.candidates;
  answer(link, why);
  return true;
}

// The transports that all ranks have, the default one first. Adds the others as candidates with the
// reason.
std::vector<Transport> TuningChain::possible_transports(std::vector<TunedCandidate>& others) {
  if (!open_.transport) return {};
  const AxisNames& axes = call_.operands.key.spec()[1];
  const Place place = call_.device.place();
  std::vector<Transport> possible;
  for (const Transport transport : call_.mesh.transports(axes, place)) {
    const auto pass_over = [&](const Error& error) {
      TunedCandidate& one = others.emplace_back();
      one.choice.transport = transport;
      one.reason = error.what();
    };
    try {
      static_cast<void>(call_.mesh.group(axes, place, transport));
      possible.push_back(transport);
    } catch (const UserError& error) {
      pass_over(error);
    } catch (const AgreedFailure& error) {
      pass_over(error);
    }
  }
  return possible;
}

bool TuningChain::measure() {
  Control& control = call_.mesh.world();
  const std::int64_t begin = monotonic_ns();
  std::vector<TunedCandidate> impossible;
  const std::vector<Transport> transports = possible_transports(impossible);
  const std::string mine = collectively(control, "candidates", [&] {
    const Computing computing = control.computing();
    if (control.rank() != 0) return std::string();
    return candidates_json(
        tuning_candidates(input_, open_, schedule_, transports, call_.options.tuning));
  });
  std::vector<TunedCandidate> candidates = parse_candidates(control.broadcast(mine, "candidates"));
  candidates.insert(candidates.end(), impossible.begin(), impossible.end());
  if (timed(candidates) < 2) {
    const std::string why = reasons(candidates);
    pass(DecidedBy::measurement,
         fmt::format("there are no two plans to compare{}{}", why.empty() ? "" : ": ", why));
    return false;
  }
  try {
    time_candidates(call_, candidates);
  } catch (const AgreedFailure& error) {
    pass(DecidedBy::measurement, error.what());
    return false;
  }
  const TunedCandidate* const best = fastest(candidates);
  if (best == nullptr) {
    pass(DecidedBy::measurement, "no candidate could be timed: " + reasons(candidates));
    return false;
  }
  decision_.choice = best->choice;
  decision_.candidates = candidates;
  std::string why =
      fmt::format("timed {} of {} candidates in {:.2g} s", timed(candidates), candidates.size(),
                  static_cast<double>(monotonic_ns() - begin) * 1e-9);
  collectively(control, "writing of the tuning cache", [&] {
    const Computing computing = control.computing(kDiskTimeouts);
    if (control.rank() == 0) keep({*key_, best->choice, now(), candidates}, why);
  });
  answer(DecidedBy::measurement, why);
  share();
  return true;
}

// Runs on rank 0.
void TuningChain::keep(const TuningEntry& entry, std::string& why) {
  if (TuningCache* const cache = call_.options.tuning.cache) cache->keep(entry);
  if (file_.path.empty()) return;
  std::vector<std::string> warnings = keep_in_file(file_, entry);
  if (warnings.empty()) {
    why += ", kept in " + file_.path;
  } else {
    decision_.warnings = std::move(warnings);  // they include the warnings of reading
  }
}

bool TuningChain::reject(const std::string& message) {
  const bool last = decision_.by == DecidedBy::caller || decision_.by == DecidedBy::overlay ||
                    decision_.by == DecidedBy::heuristics;
  if (last) return false;
  pass(decision_.by,
       fmt::format("its choice, {}, fails: {}", choice_text(decision_.choice), message));
  if (call_.options.tuning.cache != nullptr) call_.options.tuning.cache->forget(*key_);
  next_ = static_cast<DecidedBy>(static_cast<int>(decision_.by) + 1);
  has_rejected_ = true;
  return true;
}

std::string TuningChain::tried() const {
  if (!has_rejected_) return {};
  std::string text;
  for (const Decision::Passed& one : decision_.passed) {
    text += fmt::format("; before that, {}: {}", name_of(one.link), one.reason);
  }
  return text;
}

void check_same_tuning(Control& control, const ShardedAttentionOptions& options) {
  const TuningOptions& tuning = options.tuning;
  const std::string mine =
      fmt::format("tuning {} (factor {}, {} candidates of {} runs, {} s), overlay of {}",
                  name_of(tuning.policy), tuning.factor, tuning.candidates, tuning.runs,
                  tuning.seconds, choice_text(options.overlay));
  if (const auto other = control.first_difference(mine, "how to tune")) {
    throw ArgumentError(fmt::format("attention on rank {}", other->rank), other->text,
                        other->expected + ", as on rank 0");
  }
  if (!(tuning.factor >= 1)) {
    throw ArgumentError("tuning factor", fmt::format("{}", tuning.factor), "1 or more");
  }
  if (tuning.candidates < 1 || tuning.runs < 1) {
    throw ArgumentError("tuning",
                        fmt::format("{} candidates, {} runs", tuning.candidates, tuning.runs),
                        "1 or more of each");
  }
  if (!(tuning.seconds > 0)) {
    throw ArgumentError("tuning seconds", fmt::format("{}", tuning.seconds), "more than 0");
  }
}

}  // namespace annulus::ring
