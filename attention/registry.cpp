#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

#include "cuda_implementations.hpp"
#include "native/native.hpp"
#include "vanilla/vanilla.hpp"

namespace annulus {
namespace {

constexpr const char* kForceNative = "ANNULUS_FORCE_NATIVE";

bool has_name(const Implementation& implementation, std::string_view name) {
  const std::vector<std::string>& names = implementation.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

Capability accepts_one_query(const AttentionProblem& problem) {
  const std::int64_t length = problem.shape.query_length;
  if (length == 1) return Capability::yes();
  return Capability::no(fmt::format("computes one query per sequence, not T = {}", length));
}

}  // namespace

Registry Registry::standard() {
  Registry registry;
  registry.add(make_sdpa_implementation());
  registry.add(make_flash_implementation());
  registry.add(make_blocksparse_implementation());
  registry.add(make_native_implementation());
  registry.add(make_vanilla_implementation());
  registry.add({"ring", "ring", [](const AttentionProblem&) { return Capability::yes(); }});
  registry.add({"autoregressive_decodeattn", "auto", accepts_one_query});
  return registry;
}

void Registry::take_names(const std::vector<std::string>& names) {
  std::vector<std::string> taken = names_;
  taken.emplace_back("auto");
  for (const std::string& name : names) {
    if (std::find(taken.begin(), taken.end(), name) != taken.end()) {
      throw ArgumentError("implementation name", name, "a name that is not taken");
    }
    taken.push_back(name);
  }
  names_.insert(names_.end(), names.begin(), names.end());
}

void Registry::add(std::unique_ptr<Implementation> implementation) {
  take_names(implementation->names());
  implementations_.push_back(std::move(implementation));
}

void Registry::add(Strategy strategy) {
  take_names({strategy.name});
  strategies_.push_back(std::move(strategy));
}

const Implementation& Registry::get(std::string_view name) const {
  for (const auto& implementation : implementations_) {
    if (has_name(*implementation, name)) return *implementation;
  }
  if (strategy(name) != nullptr) {
    throw ArgumentError("implementation", std::string(name), "a local kernel, not a strategy");
  }
  throw ArgumentError("implementation", std::string(name),
                      fmt::format("one of auto, {}", fmt::join(names_, ", ")));
}

const Strategy* Registry::strategy(std::string_view name) const {
  const auto found = std::find_if(strategies_.begin(), strategies_.end(),
                                  [&](const Strategy& known) { return known.name == name; });
  return found == strategies_.end() ? nullptr : &*found;
}

void Registry::check_name(std::string_view name) const {
  if (name != "auto" && strategy(name) == nullptr) static_cast<void>(get(name));
}

Selection Registry::select(std::string_view name, const AttentionProblem& problem, Place place,
                           Presence presence, Pass pass) const {
  const auto can = [&](const Implementation& implementation) {
    const Capability fit = pass == Pass::forward ? implementation.fits(problem, place)
                                                 : implementation.fits_backward(problem, place);
    return !fit || presence == Presence::assumed ? fit : implementation.available(place);
  };
  const char* const remedy =
      problem.in_global_order()
          ? "; --reproducible world wants native or auto on CPU ranks (float32, float16 or "
            "bfloat16), or flash_attn2 or auto on Hopper GPUs (float16 or bfloat16; gradients: "
            "bfloat16); "
            "--reproducible run has no such limits"
          : "";
  const auto refuse = [&](std::string_view refuser, const Capability& capability) {
    if (capability) return;
    throw UnsupportedError(
        fmt::format("implementation {}: {}{}", refuser, capability.reason(), remedy));
  };
  Selection selection;
  if (const Strategy* named = strategy(name)) {
    refuse(name, named->accepts(problem));
    selection.schedule = named->schedule;
    name = "auto";
  }
  const bool forced = name != "native" && environment_flag(kForceNative);
  if (forced) name = "native";
  if (name != "auto") {
    const Implementation& chosen = get(name);
    refuse(forced ? fmt::format("native, which {} asks for", kForceNative) : std::string(name),
           can(chosen));
    selection.candidates.push_back(&chosen);
    for (const auto& other : implementations_) {
      if (!forced || other.get() == &chosen) continue;
      selection.passed_over.emplace_back(other->names().front(),
                                         fmt::format("{} asks for native", kForceNative));
    }
    return selection;
  }
  std::string reasons;
  const FeatureSet asked = features_of(problem);
  for (const auto& implementation : implementations_) {
    const FeatureSet& meant_for = implementation->declares().meant_for;
    const Capability capability =
        pass == Pass::backward || meant_for.empty() || meant_for.intersects(asked)
            ? can(*implementation)
            : Capability::no("meant for problems with " + to_string(meant_for));
    if (capability) {
      selection.candidates.push_back(implementation.get());
      continue;
    }
    selection.passed_over.emplace_back(implementation->names().front(), capability.reason());
    reasons += fmt::format("; {}: {}", implementation->names().front(), capability.reason());
  }
  if (selection.candidates.empty()) {
    throw UnsupportedError(fmt::format("no implementation can {} the problem on {}{}{}",
                                       pass == Pass::forward ? "run" : "compute the gradients of",
                                       to_string(place), reasons, remedy));
  }
  return selection;
}

std::string Selection::schedule_for(const std::string& wanted) const {
  if (schedule == "auto" || schedule == wanted) return wanted;
  if (wanted == "auto") return schedule;
  throw ArgumentError("schedule", wanted,
                      fmt::format("auto or {0}: implementation {0} is that schedule", schedule));
}

}  // namespace annulus
