#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <annulus/ring/plan.hpp>

/// Marks that the stream of a group's exchanges sets on a device, in this order: the start of a
/// call (0);
/// for each exchange, that it has offered what it sends and is taking, and that it has taken; the
/// end.
namespace annulus::ring {

[[nodiscard]] constexpr std::uint32_t taking_mark(std::size_t exchange) {
  return 2 * static_cast<std::uint32_t>(exchange) + 1;
}
[[nodiscard]] constexpr std::uint32_t taken_mark(std::size_t exchange) {
  return taking_mark(exchange) + 1;
}
/// After `exchanges` of them.
[[nodiscard]] constexpr std::uint32_t finished_mark(std::size_t exchanges) {
  return taking_mark(exchanges);
}

/// Indices of the tasks that are exchanges of a group, in order.
[[nodiscard]] std::vector<std::size_t> exchanges_of(const RankPlan& plan, int group);

/// For a rank whose exchanges of a group have reached `mark`: whom it waits for, and for what, as
/// in "step 2: waiting for key/value: 4096 bytes from rank 1" (a rank of the mesh). Empty if it
/// waits for nobody. In a one-sided group (see TransportTraits), a rank that takes waits only for
/// its senders, and between two exchanges for those that take from it: what the last exchange of
/// each contents has sent.
[[nodiscard]] std::string describe_transfers(const RankPlan& plan, int group, std::uint32_t mark,
                                             bool one_sided);

/// "key/value": what a message of this exchange carries.
[[nodiscard]] std::string contents_of(const RankPlan& plan, const Exchange& exchange);

}  // namespace annulus::ring
