#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <annulus/ring/plan.hpp>

/// Marks that the stream of a group's exchanges sets on a device, in this order: the start of a
/// call (0); for each exchange, that it has offered its messages and is taking, then that it has
/// taken; the end.
namespace annulus::ring {

[[nodiscard]] constexpr std::uint32_t taking_mark(std::size_t exchange) {
  return 2 * static_cast<std::uint32_t>(exchange) + 1;
}
[[nodiscard]] constexpr std::uint32_t taken_mark(std::size_t exchange) {
  return taking_mark(exchange) + 1;
}
/// The mark after `exchanges` exchanges.
[[nodiscard]] constexpr std::uint32_t finished_mark(std::size_t exchanges) {
  return taking_mark(exchanges);
}

/// Indices of the tasks that are exchanges of a group, in order.
[[nodiscard]] std::vector<std::size_t> exchanges_of(const RankPlan& plan, int group);

/// Describes the wait of a rank whose exchanges of a group have reached `mark`: "step 2: waiting
/// for key/value: 4096 bytes from rank 1" (a rank of the mesh). Empty if it waits for no rank. In a
/// one-sided group (see TransportTraits), a rank that is taking waits only for its senders; between
/// two exchanges, it waits for the ranks that take from it, for the last exchange of each contents.
[[nodiscard]] std::string describe_transfers(const RankPlan& plan, int group, std::uint32_t mark,
                                             bool one_sided);

}  // namespace annulus::ring
