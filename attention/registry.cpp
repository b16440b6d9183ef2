#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

#include "cuda_implementations.hpp"
#include "native/native.hpp"

namespace annulus {
namespace {

bool has_name(const Implementation& implementation, std::string_view name) {
  const std::vector<std::string>& names = implementation.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Registry Registry::standard() {
  Registry registry;
  registry.add(make_sdpa_implementation());
  registry.add(make_flash_implementation());
  registry.add(make_blocksparse_implementation());
  registry.add(make_native_implementation());
  return registry;
}

void Registry::add(std::unique_ptr<Implementation> implementation) {
  std::vector<std::string> taken = names();
  taken.emplace_back("auto");
  for (const std::string& name : implementation->names()) {
    if (std::find(taken.begin(), taken.end(), name) != taken.end()) {
      throw ArgumentError("implementation name", name, "a name that is not taken");
    }
    taken.push_back(name);
  }
  implementations_.push_back(std::move(implementation));
}

const Implementation& Registry::get(std::string_view name) const {
  for (const auto& implementation : implementations_) {
    if (has_name(*implementation, name)) return *implementation;
  }
  throw ArgumentError("implementation", std::string(name),
                      fmt::format("one of auto, {}", fmt::join(names(), ", ")));
}

std::vector<std::string> Registry::names() const {
  std::vector<std::string> all;
  for (const auto& implementation : implementations_) {
    all.insert(all.end(), implementation->names().begin(), implementation->names().end());
  }
  return all;
}

Selection Registry::select(std::string_view name, const AttentionProblem& problem,
                           Place place, Presence presence) const {
  const auto can = [&](const Implementation& implementation) {
    return presence == Presence::assumed ? implementation.fits(problem, place)
                                         : implementation.capability(problem, place);
  };
  if (environment_flag("ANNULUS_FORCE_NATIVE")) name = "native";
  if (name != "auto") {
    const Implementation& chosen = get(name);
    if (const Capability capability = can(chosen); !capability) {
      throw UnsupportedError(fmt::format("implementation {}: {}", name, capability.reason()));
    }
    return {{&chosen}, {}};
  }
  Selection selection;
  std::string reasons;
  const FeatureSet asked = features_of(problem);
  for (const auto& implementation : implementations_) {
    const FeatureSet& meant_for = implementation->declares().meant_for;
    const Capability capability =
        meant_for.empty() || meant_for.intersects(asked)
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
    throw UnsupportedError(
        fmt::format("no implementation can run the problem on {}{}", to_string(place), reasons));
  }
  return selection;
}

}  // namespace annulus
