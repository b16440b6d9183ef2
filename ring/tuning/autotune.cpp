#include "tuning/autotune.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/trace.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/timing.hpp>

#include "tuning/choice.hpp"
#include "tuning/scratch.hpp"

namespace annulus::ring {
namespace {

// Times closer than this are noise: the earlier candidate then wins, and the choice of heuristics
// comes first.
constexpr double kNoise = 1.02;
// A candidate is not timed further if its first two calls both take this many times the best so
// far.
constexpr double kHopeless = 1.5;

/// Untimed calls before the timed ones: at least this many, for at least this long. The second call
/// on a GPU is recorded and later ones are replayed; a GPU that has worked for a while runs slower.
struct WarmUp {
  int calls;
  double seconds;
};
constexpr WarmUp kOnHost{1, 5e-3};
constexpr WarmUp kOnGpu{3, 0.15};

ShardedAttentionOptions plain(const TunedCall& call, const Choice& choice) {
  ShardedAttentionOptions options = with_choice(call.options, choice, call.device.place());
  options.tuning = {};
  options.overlay = {};
  options.runner.tracer = nullptr;
  return options;
}

/// The median of some calls; `best` is that of the fastest candidate so far.
double time_one(const TunedCall& call, const Choice& choice, const LocalTensors& tensors,
                double best) {
  Control& world = call.mesh.world();
  ShardedAttention attention(call.problem, call.operands, call.mesh, call.registry, call.device,
                             plain(call, choice));
  attention.rehearse(tensors);
  const auto run = [&] { attention.run(tensors); };
  const WarmUp& warm_up = call.device.place().is_host() ? kOnHost : kOnGpu;
  double warm = 0;
  for (int i = 0; i < warm_up.calls || warm < warm_up.seconds; ++i) warm += seconds_of(world, run);
  std::vector<double> seconds;
  for (int i = 0; i < std::max(1, call.options.tuning.runs); ++i) {
    seconds.push_back(seconds_of(world, run));
    if (i == 1 && std::min(seconds[0], seconds[1]) > best * kHopeless) break;
  }
  return timing_of(std::move(seconds)).median;
}

}  // namespace

void time_candidates(const TunedCall& call, std::vector<TunedCandidate>& candidates) {
  Control& world = call.mesh.world();
  const std::int64_t begin = monotonic_ns();
  const ScratchTensors scratch = collectively(world, "tensors for tuning", [&] {
    const Computing computing = world.computing(kComputingTimeouts);
    return ScratchTensors(call.problem, call.operands, call.mesh.rank(), call.device,
                          call.mesh.watchdog());
  });
  double best = std::numeric_limits<double>::infinity();
  for (TunedCandidate& candidate : candidates) {
    if (!candidate.reason.empty()) continue;
    const double own = static_cast<double>(monotonic_ns() - begin) * 1e-9;
    const double elapsed = world.max(std::array{own}, "time spent on tuning")[0];
    if (elapsed > call.options.tuning.seconds) {
      candidate.reason =
          fmt::format("the {:g} s for tuning were used up", call.options.tuning.seconds);
      continue;
    }
    // All ranks throw these errors together, before anything is sent; afterwards they could not
    // agree any more. The next candidate may do better.
    try {
      candidate.seconds = time_one(call, candidate.choice, scratch.tensors(), best);
    } catch (const UserError& error) {
      candidate.reason = error.what();
    } catch (const AgreedFailure& error) {
      candidate.reason = error.what();
    }
    if (candidate.reason.empty()) best = std::min(best, candidate.seconds);
  }
}

const TunedCandidate* fastest(const std::vector<TunedCandidate>& candidates) {
  double least = std::numeric_limits<double>::infinity();
  for (const TunedCandidate& one : candidates) {
    if (one.reason.empty() && one.seconds > 0) least = std::min(least, one.seconds);
  }
  const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const auto& one) {
    return one.reason.empty() && one.seconds > 0 && one.seconds <= least * kNoise;
  });
  return found == candidates.end() ? nullptr : &*found;
}

}  // namespace annulus::ring
