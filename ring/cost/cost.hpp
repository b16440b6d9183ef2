#pragma once

#include <annulus/ring/plan.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {

/// What handing a result over costs, in passes over it: when a kernel continues it beside its
/// products, and when it is combined with others (measured on two GPUs: benchmarks/NOTES.md).
inline constexpr double kPassesToContinue = 2;
inline constexpr double kPassesToCombine = 5;

/// Predicted seconds of a task that a rank does by itself. Tasks are priced only here.
[[nodiscard]] double seconds_of(const RankPlan& plan, const Block& block, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Copy& copy, const Prices& prices);
[[nodiscard]] double seconds_of(const RankPlan& plan, const Reduce& reduce, const Prices& prices);

/// Predicted seconds from the begin of a block that awaits its columns until it needs more than the
/// last `columns` of them. Its first tiles meet the columns from the last to the first; the tiles
/// after them find what these have waited for.
[[nodiscard]] double seconds_before_waiting(const RankPlan& plan, const Block& block,
                                            std::int64_t columns, const Prices& prices);

/// Predicted seconds of one side's messages of an exchange.
[[nodiscard]] double seconds_of(const std::vector<Transfer>& transfers, const Prices& prices);

}  // namespace annulus::ring
