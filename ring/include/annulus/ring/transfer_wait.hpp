#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <annulus/ring/plan.hpp>

/// What the communication stream of a device marks, in this order: the start of a call (0); for
/// each step that moves something, that it has offered what it sends and is taking, and that it has
/// taken; the end.
namespace annulus::ring {

[[nodiscard]] constexpr std::uint32_t taking_mark(std::size_t step) {
  return 2 * static_cast<std::uint32_t>(step) + 1;
}
[[nodiscard]] constexpr std::uint32_t taken_mark(std::size_t step) {
  return taking_mark(step) + 1;
}
[[nodiscard]] inline std::uint32_t finished_mark(const RankPlan& plan) {
  return taking_mark(plan.steps.size());
}

/// Whom a rank waits for that has come to `mark`, and for what: "step 2: waiting for key/value:
/// 4096 bytes from rank 1". Empty if it waits for nobody. In a group that is one-sided (see Group),
/// a rank that takes waits for its senders only, and between two steps for those that take from it.
[[nodiscard]] std::string describe_transfers(const RankPlan& plan, std::uint32_t mark,
                                             bool one_sided);

}  // namespace annulus::ring
