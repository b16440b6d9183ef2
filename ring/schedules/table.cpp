#include <array>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "schedules/schedules.hpp"

namespace annulus::ring {
namespace {

bool is_sharded(const PlanInput& input) {
  return input.operands.key.shards(1) > 1;
}

std::string nothing(const PlanInput& /*input*/) {
  return {};
}

std::string needs_whole_sequence(const PlanInput& input) {
  if (!is_sharded(input)) return {};
  return fmt::format("the key/value sequence is sharded along {}",
                     to_string(input.operands.key.spec()[1]));
}

std::string wants_sharded_sequence(const PlanInput& input) {
  if (is_sharded(input)) return {};
  return "the key/value sequence is not sharded: nothing has to be sent";
}

constexpr std::array kTable{
    ScheduleEntry{Schedule::local, plan_local, needs_whole_sequence, nothing},
    ScheduleEntry{Schedule::ring, plan_ring, nothing, wants_sharded_sequence},
    ScheduleEntry{Schedule::allgather, plan_allgather, nothing, wants_sharded_sequence}};

}  // namespace

std::span<const ScheduleEntry> schedule_table() {
  return kTable;
}

const ScheduleEntry& entry_of(Schedule schedule) {
  for (const ScheduleEntry& entry : kTable) {
    if (entry.schedule == schedule) return entry;
  }
  throw InternalError("schedule without a planner");
}

}  // namespace annulus::ring
