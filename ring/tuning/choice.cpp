#include "tuning/choice.hpp"

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>

#include "tuning/parameters.hpp"

namespace annulus::ring {
namespace {

constexpr std::array<std::string_view, 3> kPolicies{"off", "cached", "measure"};
constexpr std::array<std::string_view, 6> kLinks{"the caller",    "an overlay",  "cache in memory",
                                                 "cache in file", "measurement", "heuristics"};

void set_if_open(std::string& into, const std::string& value, std::string_view open) {
  if (into == open && !value.empty()) into = value;
}
template <class Value>
void set_if_open(Value& into, const Value& value) {
  if (into == Value{}) into = value;
}

}  // namespace

std::string_view name_of(TuningPolicy policy) noexcept {
  return kPolicies[static_cast<std::size_t>(policy)];
}

TuningPolicy parse_tuning_policy(std::string_view name) {
  for (std::size_t i = 0; i < kPolicies.size(); ++i) {
    if (name == kPolicies[i]) return static_cast<TuningPolicy>(i);
  }
  throw ArgumentError("tuning", fmt::format("'{}'", name),
                      fmt::format("{}", fmt::join(kPolicies, ", ")));
}

std::string_view name_of(DecidedBy link) noexcept {
  return kLinks[static_cast<std::size_t>(link)];
}

std::string choice_text(const Choice& choice) {
  std::vector<std::string> parts;
  if (!choice.schedule.empty()) parts.push_back("schedule " + choice.schedule);
  for_each_parameter([&](const char*, const char* text, auto chosen, auto) {
    if (choice.*chosen > 0) parts.push_back(fmt::format(fmt::runtime(text), choice.*chosen));
  });
  if (!choice.implementation.empty()) parts.push_back("implementation " + choice.implementation);
  if (choice.transport != Transport::automatic) {
    parts.push_back(fmt::format("transport {}", annulus::name_of(choice.transport)));
  }
  return parts.empty() ? "nothing" : fmt::format("{}", fmt::join(parts, ", "));
}

Choice nested(const Choice& outer, const Choice& inner) {
  Choice both = inner;
  set_if_open(both.implementation, outer.implementation);
  set_if_open(both.schedule, outer.schedule);
  set_if_open(both.transport, outer.transport);
  for_each_parameter([&](const char*, const char*, auto chosen, auto) {
    set_if_open(both.*chosen, outer.*chosen);
  });
  return both;
}

OpenChoices open_choices(const ShardedAttentionOptions& options, const PlanInput& input,
                         const std::string& schedule, Place place) {
  const PlanOptions plan = options.plan.value_or(PlanOptions::for_place(place));
  const bool sharded = input.operands.key.shards(1) > 1;
  const auto may_be = [&](std::string_view name) {
    return sharded && (schedule == "auto" || schedule == name);
  };
  OpenChoices open;
  open.implementation = input.candidates.size() > 1 && plan.preferred.empty();
  open.schedule = sharded && schedule == "auto";
  open.transport = sharded && !place.is_host() && options.transport == Transport::automatic;
  open.ulysses_degree = open.schedule && plan.ulysses_degree == 0;
  open.inner_size = may_be("double_ring") && plan.inner_size == 0;
  open.head_groups = (may_be("ulysses") || may_be("hybrid")) && plan.head_group_bytes == 0;
  return open;
}

ShardedAttentionOptions under_overlay(ShardedAttentionOptions options, Place place) {
  const Choice overlay = std::exchange(options.overlay, {});
  if (overlay.is_open()) return options;
  Choice& counts = options.overlay;
  const auto set = [&]<class Value>(Value& into, Value Choice::*member, const Value& open) {
    if (into == open && overlay.*member != Value{}) into = counts.*member = overlay.*member;
  };
  PlanOptions plan = options.plan.value_or(PlanOptions::for_place(place));
  set(options.implementation, &Choice::implementation, std::string("auto"));
  set(options.schedule, &Choice::schedule, std::string("auto"));
  if (!place.is_host()) set(options.transport, &Choice::transport, Transport::automatic);
  for_each_parameter([&](const char*, const char*, auto chosen, auto planned) {
    set(plan.*planned, chosen, decltype(overlay.*chosen + 0){0});
  });
  options.plan = plan;
  return options;
}

ShardedAttentionOptions with_choice(ShardedAttentionOptions options, const Choice& choice,
                                    Place place) {
  PlanOptions plan = options.plan.value_or(PlanOptions::for_place(place));
  set_if_open(plan.preferred, choice.implementation);
  set_if_open(options.schedule, choice.schedule, "auto");
  set_if_open(options.transport, choice.transport);
  for_each_parameter([&](const char*, const char*, auto chosen, auto planned) {
    set_if_open(plan.*planned, choice.*chosen);
  });
  options.plan = plan;
  return options;
}

PlanInput with_choice(PlanInput input, const Choice& choice) {
  if (!choice.implementation.empty()) input.options.preferred = choice.implementation;
  input.options = with_parameters(input.options, choice);
  if (choice.transport != Transport::automatic) {
    input.prices.model.adopt_transport(annulus::name_of(choice.transport));
  }
  return input;
}

}  // namespace annulus::ring
