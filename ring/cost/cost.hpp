#pragma once

#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// The cost of handing a partial result over, in passes over its memory: if another kernel
/// continues it, and if it is combined with others (measured on two GPUs: benchmarks/NOTES.md).
inline constexpr double kPassesToContinue = 2;
inline constexpr double kPassesToCombine = 5;

/// Predicted seconds of a task that a rank does by itself. Tasks are priced only here.
[[nodiscard]] double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices);

/// Predicted seconds from the start of a block that awaits its columns until it needs more than the
/// last `columns` of them. Only the tiles computed first wait: they walk the columns from the last
/// to the first, and all columns that they have walked are there for later tiles.
[[nodiscard]] double seconds_before_waiting(const RankPlan& plan, const Block& block,
                                            std::int64_t columns, const Prices& prices);

/// Predicted seconds of one side's messages of an exchange.
[[nodiscard]] double seconds_of(const std::vector<Transfer>& transfers, const Prices& prices);

}  // namespace annulus::ring
