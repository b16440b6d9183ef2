#include "launcher/options/effects.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

using Given = std::set<std::string_view>;
using Names = std::vector<std::string_view>;

bool contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// All options that bench --hops uses.
const Names& of_hops() {
  static const Names names{"mesh",       "sequence-axis", "rank-order", "device", "transport",
                           "share-gpus", "json",          "csv",        "wide",   "legend",
                           "timeout",    "warmup",        "iters",      "sweep",  "hops",
                           "config",     "metadata"};
  return names;
}

// Options that bench --calibrate ignores: it times kernels on blocks of its own, on one rank.
const Names& not_of_calibrate() {
  static const Names names{"query-spec",      "kv-spec",    "bias-spec",      "mask-spec",
                           "sequence-layout", "granule",    "schedule",       "ulysses-degree",
                           "inner-size",      "mode",       "sharding-rules", "tuning",
                           "tuning-cache",    "cost-model", "explain"};
  return names;
}

// Refuses options that a form of a command ignores.
void check_forms(const Options& options, const Given& given) {
  const auto refuse = [&](bool form, const char* name, const char* which, const auto& is_unused) {
    if (!form) return;
    for (const std::string_view option : given) {
      if (!is_unused(option)) continue;
      throw UserError(fmt::format("--{0}: has no effect with {1}, which {2}; give it without {1}",
                                  option, name, which));
    }
  };
  const auto any_of = [](const Names& names) {
    return [names](std::string_view option) { return contains(names, option); };
  };
  const bool plan = options.command == Command::plan;
  refuse(options.hops, "--hops", "only times transfers of --sweep bytes",
         [](std::string_view option) { return !contains(of_hops(), option); });
  refuse(!options.calibrate.empty(), "--calibrate", "times kernels and transfers one by one",
         any_of(not_of_calibrate()));
  refuse(options.scaling, "--scaling", "has lengths of its own (see --tokens-per-rank)",
         any_of({"sweep"}));
  refuse(options.scaling, "--scaling", "compares many plans", any_of({"explain", "show-ranks"}));
  refuse(options.recommend, "--recommend", "compares many plans",
         any_of({"explain", "show-ranks"}));
  refuse(plan && options.simulate, "--simulate", "shows what ranks do, not why",
         any_of({"explain"}));
  refuse(options.random > 0, "--random", "computes many problems", any_of({"explain"}));
  refuse(options.random_case.has_value(), "--random-case", "draws one of many problems",
         any_of({"explain"}));
  refuse(options.random_case.has_value(), "--random-case", "names its seed itself",
         any_of({"seed"}));
}

bool draws_something(const Options& options) {
  const std::array drawn{&options.block_mask, &options.sinks, &options.bias, &options.mask};
  return options.dropout > 0 || std::any_of(drawn.begin(), drawn.end(), [](const auto* value) {
           return value->starts_with("random:");
         });
}

// The schedule, and the option that asks for it: some names of --impl stand for a schedule.
struct ScheduleSource {
  std::string schedule;
  std::string shown;
};

ScheduleSource schedule_of(const Options& options) {
  const Registry registry = Registry::standard();
  for (const Strategy& strategy : registry.strategies()) {
    if (strategy.name != options.implementation || strategy.schedule == "auto") continue;
    return {strategy.schedule, "--impl " + strategy.name};
  }
  return {options.schedule, "--schedule " + options.schedule};
}

}  // namespace

void check_effects(const Options& options, const Given& given) {
  check_forms(options, given);
  const auto check = [&](std::string_view option, bool effective, const auto& with,
                         std::string_view needed) {
    if (effective || !given.contains(option)) return;
    throw UserError(fmt::format("--{}: has no effect {}; it needs {}", option, with, needed));
  };
  const auto [schedule, shown] = schedule_of(options);
  for (const auto& [option, user] :
       {std::pair("ulysses-degree", "hybrid"), std::pair("inner-size", "double_ring")}) {
    check(option, schedule == "auto" || schedule == user, "with " + shown,
          fmt::format("--schedule {} or auto", user));
  }
  const bool specs = options.query_spec && options.kv_spec;
  constexpr const char* kBothSpecs = "with both --query-spec and --kv-spec";
  constexpr const char* kOneSpec = "one of them left to its default";
  check("mode", !specs, kBothSpecs, kOneSpec);
  check("sharding-rules", !specs, kBothSpecs, kOneSpec);
  check("sequence-axis", !(specs && options.mesh), "with --mesh, --query-spec and --kv-spec",
        kOneSpec);
  check("tuning-cache", options.tuning != ring::TuningPolicy::off, "without --tuning",
        "--tuning cached or measure");
  check("straggler-seed", options.straggler_percent > 0, "without --straggler-percent",
        "--simulate and --straggler-percent above 0");
  check("nodes", options.recommend, "without --recommend", "--recommend and --ranks");
  const bool files = options.command == Command::run || options.command == Command::plan;
  check("seed", !files || draws_something(options), "where nothing is drawn",
        "--dropout, or --mask, --bias, --block-mask or --sinks with a value that begins with "
        "random:");
}

}  // namespace annulus::launcher
