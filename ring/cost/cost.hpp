#pragma once

#include <span>
#include <vector>

#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// The cost of handing a partial result over, in passes over its memory: if another kernel
/// continues it, and if it is combined with others (measured on two GPUs: benchmarks/NOTES.md).
inline constexpr double kPassesToContinue = 2;
inline constexpr double kPassesToCombine = 5;

/// Predicted seconds of a task that a rank does by itself, but for the launch of copies: those that
/// follow each other share one. Tasks are priced only here.
[[nodiscard]] double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Delta& delta, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const SinkGradient& gradient,
                                const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const BackwardBlock& block,
                                const Prices& prices);
/// Of the gradients of a tile, that of a bias left out: before it is known where they are added.
[[nodiscard]] double seconds_of_gradients(const RankPlan& plan, const Tile& tile,
                                          const Prices& prices);

/// Predicted seconds from the start of a block that awaits its columns until it needs more than the
/// last `columns` of them. Only the tiles computed first wait: they walk the columns from the last
/// to the first, and all columns that they have walked are there for later tiles.
[[nodiscard]] double seconds_before_waiting(const RankPlan& plan, const Block& block,
                                            std::int64_t columns, const Prices& prices);

/// Costs of the messages of an exchange that one rank gets, or sends, one after the other.
struct MessageCosts {
  /// Before a message moves: before each, or before the first only, if the transport starts them
  /// once.
  double latency = 0;
  std::vector<double> seconds;  ///< that each keeps its links busy
};

/// Costs of messages to other nodes (`across`) or inside one, by the bytes of each. In all, it is
/// what
/// CostModel::transfer_seconds() says.
[[nodiscard]] MessageCosts costs_of_messages(std::span<const double> bytes, bool across,
                                             const CostModel& model);

}  // namespace annulus::ring
