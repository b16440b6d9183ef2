#pragma once

#include <annulus/ring/planner.hpp>
#include <annulus/ring/tuning.hpp>

namespace annulus::ring {

/// Calls visit(key, text, member of Choice, member of PlanOptions) for every parameter of schedules
/// that can be chosen; 0 leaves it open. `key` is its name in files, `text` a format string for its
/// value.
template <class Visit>
void for_each_parameter(const Visit& visit) {
  visit("ulysses_degree", "ulysses degree {}", &Choice::ulysses_degree,
        &PlanOptions::ulysses_degree);
  visit("inner_size", "inner size {}", &Choice::inner_size, &PlanOptions::inner_size);
  visit("head_group_bytes", "head groups of {} bytes", &Choice::head_group_bytes,
        &PlanOptions::head_group_bytes);
}

/// The plan options with the parameters that `choice` names.
inline PlanOptions with_parameters(PlanOptions plan, const Choice& choice) {
  for_each_parameter([&](const char*, const char*, auto chosen, auto planned) {
    if (choice.*chosen != 0) plan.*planned = choice.*chosen;
  });
  return plan;
}

}  // namespace annulus::ring
