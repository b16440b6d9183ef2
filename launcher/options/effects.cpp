#include "launcher/options/effects.hpp"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>

#include "launcher/options/option_table.hpp"
#include "launcher/options/option_values.hpp"

namespace annulus::launcher {
namespace {

class Effects {
 public:
  explicit Effects(const Options& options) : options_(options) {}

  void check() const {
    check_what_is_drawn();
    check_forms();
    check_tables();
    check_sharding();
    check_needs();
  }

 private:
  /// True if the option was given anywhere, with any value.
  [[nodiscard]] bool has(std::string_view option) const {
    return options_.given_value(option) != nullptr;
  }

  /// "--seed 7", or "--explain".
  [[nodiscard]] std::string shown(std::string_view option) const {
    const bool is_flag = find_option(option)->is_flag();
    return fmt::format("--{}{}", option, is_flag ? "" : " " + *options_.given_value(option));
  }

  /// True for a flag that is set to false: --causal=false.
  [[nodiscard]] bool is_switched_off(std::string_view option) const {
    const bool is_flag = find_option(option)->is_flag();
    return is_flag && !parse_flag(std::string(option), *options_.given_value(option));
  }

  /// True if the option was given on the command line and not switched off.
  [[nodiscard]] bool asks(std::string_view option) const {
    return options_.named.contains(option) && !is_switched_off(option);
  }

  /// Refuses `option` unless it has an effect.
  void need(std::string_view option, bool effective, std::string_view cause,
            std::string_view needed) const {
    if (effective || !asks(option)) return;
    throw UserError(fmt::format("{}: has no effect {}; it needs {}", shown(option), cause, needed));
  }

  /// If `other` is given, refuses every option for which is_unused(entry) is true. `which` says
  /// why.
  template <class IsUnused>
  void refuse_if(bool is_given, std::string_view other, std::string_view which,
                 const IsUnused& is_unused) const {
    if (!is_given) return;
    for (const std::string& option : options_.named) {
      if (!asks(option) || !is_unused(*find_option(option))) continue;
      throw UserError(fmt::format("{0}: has no effect with {1}, which {2}; give it without {1}",
                                  shown(option), other, which));
    }
  }
  void refuse(bool is_given, std::string_view other, std::string_view which,
              std::initializer_list<std::string_view> names) const {
    refuse_if(is_given, other, which, [&](const OptionEntry& entry) {
      return std::find(names.begin(), names.end(), entry.name) != names.end();
    });
  }

  void check_what_is_drawn() const {
    if (options_.random == 0 && !options_.random_case) return;
    const char* const form = options_.random_case ? "--random-case" : "--random";
    for (const auto& [option, text] : options_.given_values) {
      const OptionEntry& entry = *find_option(option);
      if (!entry.uses.drawn || is_switched_off(option)) continue;
      Options alone;
      entry.apply(alone, option, text);
      if (!options_.named.contains(option) && alone == Options()) continue;
      throw UserError(
          fmt::format("{}: drawn at random, so it cannot be given with {}", shown(option), form));
    }
    const Registry registry = Registry::standard();
    for (const Strategy& strategy : registry.strategies()) {
      if (strategy.name != options_.implementation) continue;
      throw UserError(
          fmt::format("--impl {}: restricts what is drawn at random, so it cannot be given with {}",
                      strategy.name, form));
    }
  }

  // Checks for options that a form of a command ignores.
  void check_forms() const {
    const Options& o = options_;
    const bool plan = o.command == Command::plan;
    refuse_if(o.hops, "--hops", "only times transfers of --sweep bytes",
              [](const OptionEntry& entry) { return !entry.uses.with_hops; });
    refuse_if(!o.calibrate.empty(), "--calibrate", "times kernels and transfers one by one",
              [](const OptionEntry& entry) { return !entry.uses.with_calibrate; });
    refuse(o.scaling, "--scaling", "sets the lengths itself (see --tokens-per-rank)", {"sweep"});
    refuse(o.scaling && !plan, "--scaling", "times many problems",
           {"trace", "warm-seconds", "once"});
    refuse(o.once, "--once", "times first calls", {"warmup", "warm-seconds", "iters"});
    for (const auto& [form, option] :
         {std::pair(o.scaling, "--scaling"), std::pair(o.recommend, "--recommend")}) {
      refuse(form, option, "compares many plans", {"explain", "show-ranks"});
      refuse(form, option, "makes its own meshes", {"query-spec", "kv-spec"});
    }
    refuse(o.scaling, "--scaling", "makes its own meshes", {"mesh"});
    refuse(o.scaling, "--scaling", "is for forward passes", {"backward"});
    refuse(!o.forward_output.empty(), "--forward-output", "computes no forward pass",
           {"output", "lse", "maximum", "sum", "weights"});
    refuse(o.dry_run, "--dry-run", "computes nothing", {"repeat", "trace", "csv"});
    // Wherever the policy comes from, as it would compute and write a file.
    if (o.dry_run && o.tuning == ring::TuningPolicy::measure) {
      throw UserError(
          "--tuning measure: measures candidates and writes the cache, so it cannot be given with "
          "--dry-run, which computes and writes nothing; give --tuning cached or off");
    }
    refuse(plan && o.simulate, "--simulate", "shows what ranks do, not why", {"explain"});
    refuse(o.random > 0, "--random", "computes many problems", {"explain"});
    refuse(o.random_case.has_value(), "--random-case", "draws one of many problems", {"explain"});
    refuse(o.random_case.has_value(), "--random-case", "names its seed itself", {"seed"});
  }

  // Checks for options that affect only tables.
  void check_tables() const {
    const bool json = options_.json == "-";
    const bool csv = options_.csv == "-";
    constexpr const char* kInPlace = "replaces the table";
    refuse(json, "--json -", kInPlace, {"wide", "legend", "show-ranks"});
    refuse(csv, "--csv -", kInPlace, {"wide", "legend", "show-ranks"});
    refuse(csv && options_.json.empty(), "--csv -", "has rows only", {"explain"});
    refuse(json && options_.command == Command::plan, "--json -", "explains its choices anyway",
           {"explain"});
  }

  void check_sharding() const {
    const auto [schedule, by] = schedule_of();
    for (const auto& [option, user] :
         {std::pair("ulysses-degree", "hybrid"), std::pair("inner-size", "double_ring")}) {
      need(option, schedule == "auto" || schedule == user, "with " + by,
           fmt::format("--schedule {} or auto", user));
    }
    // --scaling and --recommend drop the mesh and the specs of environment and files.
    const bool makes_meshes = options_.scaling || options_.recommend;
    const bool specs = !makes_meshes && options_.query_spec && options_.kv_spec;
    constexpr const char* kBothSpecs = "with both --query-spec and --kv-spec";
    constexpr const char* kOneSpec = "one of them left to its default";
    need("mode", !specs, kBothSpecs, kOneSpec);
    need("sharding-rules", !specs, kBothSpecs, kOneSpec);
    need("sequence-axis", !(specs && options_.mesh), "with --mesh, --query-spec and --kv-spec",
         kOneSpec);
  }

  // The schedule, and the option that names it, since some names of --impl stand for a schedule.
  [[nodiscard]] std::pair<std::string, std::string> schedule_of() const {
    const Registry registry = Registry::standard();
    for (const Strategy& strategy : registry.strategies()) {
      if (strategy.name != options_.implementation || strategy.schedule == "auto") continue;
      return {strategy.schedule, "--impl " + strategy.name};
    }
    return {options_.schedule, "--schedule " + options_.schedule};
  }

  // Checks for options that need another one.
  void check_needs() const {
    const Options& o = options_;
    const bool plan = o.command == Command::plan;
    const bool simulates = o.simulate;
    const bool sizes = o.recommend || (plan && o.scaling);
    const auto need_form = [&](std::string_view option, bool form, const char* forms) {
      need(option, form, fmt::format("without {}", forms), forms);
    };
    need_form("trace", !plan || simulates, "--simulate");
    need_form("straggler-percent", simulates, "--simulate");
    need("straggler-seed", simulates && has("straggler-percent"), "without --straggler-percent",
         "--simulate and --straggler-percent");
    need_form("csv", !plan || simulates || sizes, "--simulate, --recommend or --scaling");
    need_form("max-tp", o.recommend, "--recommend");
    // --recommend takes a mesh only from the command line.
    need("max-tp", !options_.named.contains("mesh"), "with --mesh", "no --mesh");
    need_form("memory", o.recommend, "--recommend");
    need("threads", !plan || o.device != "cuda", "with --device cuda", "--device cpu");
    need_form("tokens-per-rank", o.scaling, "--scaling");
    const bool cuts = has("window") || has("chunk");
    for (const char* option : {"causal-offset", "prefix"}) {
      need(option, has("causal") || cuts, "without --causal, --window or --chunk", "one of them");
    }
    need("sink-tokens", cuts, "without --window or --chunk", "one of them");
    need("layer", has("model-config"), "without --model-config", "--model-config");
    need("metadata-lenient", has("metadata"), "without --metadata", "--metadata");
    need("tuning-cache", has("tuning"), "without --tuning", "--tuning cached or measure");
    for (const char* option : {"grad-lse", "grad-query", "grad-key", "grad-value", "grad-sinks",
                               "grad-bias", "forward-output", "forward-lse"}) {
      need(option, has("grad-output"), "without --grad-output", "--grad-output");
    }
    need("grad-sinks", has("sinks"), "without --sinks", "--sinks");
    for (const char* option : {"deterministic", "grad-wire"}) {
      // By default, half of the random problems have gradients.
      need_form(option, has("grad-output") || o.backward.value_or(has("random")),
                o.command == Command::run ? "--grad-output" : "--backward");
    }
    need("deterministic", !has("reproducible"), "beside --reproducible, which decides",
         "no --reproducible");
    need("seed", o.command == Command::verify || o.command == Command::bench || draws(),
         "where nothing is drawn",
         "--dropout, or --mask, --bias, --block-mask or --sinks with a value that begins with "
         "random:");
  }

  // True if anything is drawn besides what verify and bench always draw.
  [[nodiscard]] bool draws() const {
    const std::array values{&options_.block_mask, &options_.sinks, &options_.bias, &options_.mask};
    return has("dropout") || std::any_of(values.begin(), values.end(), [](const auto* value) {
             return value->starts_with("random:");
           });
  }

  const Options& options_;
};

}  // namespace

void check_effects(const Options& options) {
  Effects(options).check();
}

}  // namespace annulus::launcher
