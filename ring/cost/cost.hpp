#pragma once

#include <span>
#include <vector>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// The cost of handing over a partial result, in passes over its memory: to a kernel that continues
/// it, and to a reduction (measured on two GPUs: benchmarks/NOTES.md).
inline constexpr double kPassesToContinue = 2;
inline constexpr double kPassesToCombine = 5;

/// Predicted seconds of a task that a rank does by itself. The launch of copies is left out, since
/// consecutive copies share one. Tasks are priced only here.
[[nodiscard]] double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Delta& delta, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const SinkGradient& gradient,
                                const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const BackwardBlock& block,
                                const Prices& prices);
/// Seconds of a tile's gradients, except a bias's, before it is known where they are added.
[[nodiscard]] double seconds_of_gradients(const RankPlan& plan, const Tile& tile,
                                          const Prices& prices);

/// Predicted seconds from the start of a block that awaits its columns until it needs more than the
/// last `columns` columns. Only the first tiles wait: they walk the columns from the last to the
/// first, so later tiles find all of them.
[[nodiscard]] double seconds_before_waiting(const RankPlan& plan, const Block& block,
                                            std::int64_t columns, const Prices& prices);

/// Costs of the messages that one rank receives, or sends, in an exchange, one after the other.
struct MessageCosts {
  /// Before each message moves, or only before the first if the transport starts them together.
  double latency = 0;
  std::vector<double> seconds;  ///< for which each keeps its links busy
};

/// Costs of messages to other nodes (`across`) or inside one, by the bytes of each. The total is
/// CostModel::transfer_seconds().
[[nodiscard]] MessageCosts costs_of_messages(std::span<const double> bytes, bool across,
                                             const CostModel& model);

}  // namespace annulus::ring
