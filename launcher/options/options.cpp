#include "launcher/options/options.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <sstream>
#include <unistd.h>
#include <utility>

#include <boost/program_options.hpp>
#include <fmt/format.h>

#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>
#include <annulus/files/text_file.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/options/effects.hpp"
#include "launcher/options/file_names.hpp"
#include "launcher/options/metadata_values.hpp"
#include "launcher/options/nearest.hpp"
#include "launcher/options/option_help.hpp"
#include "launcher/options/option_table.hpp"
#include "launcher/options/option_values.hpp"
#include "launcher/options/version.hpp"

namespace annulus::launcher {
namespace {

namespace po = boost::program_options;

constexpr std::array kCommands{Command::run, Command::verify, Command::bench, Command::plan,
                               Command::info};
constexpr std::string_view kPrefix = "ANNULUS_";

std::vector<std::string> options_of(Command command) {
  std::vector<std::string> names;
  for (const OptionEntry& entry : option_table()) {
    if (entry.belongs_to(command)) names.push_back(entry.name);
  }
  return names;
}

Command parse_command(const std::string& word) {
  std::vector<std::string> names;
  for (const Command command : kCommands) {
    if (word == name_of(command)) return command;
    names.emplace_back(name_of(command));
  }
  throw ArgumentError("command", fmt::format("'{}'", word),
                      fmt::format("run, verify, bench, plan or info{} (annulus --help says more)",
                                  nearest_hint(word, "", names)));
}

// The options of all commands, by which Boost splits words and lines, so that an option of another
// command can be told from a misspelt one.
po::options_description descriptions() {
  po::options_description all;
  for (const OptionEntry& entry : option_table()) {
    auto* const value = po::value<std::string>();
    if (entry.is_flag()) value->implicit_value("true");
    all.add_options()(entry.name.c_str(), value);
  }
  return all;
}

[[noreturn]] void throw_unknown(const std::string& option, std::string_view name, Command command) {
  const std::string program = fmt::format("annulus {}", name_of(command));
  throw UserError(fmt::format("{0}: not an option of {1}{2} ({1} --help lists all)", option,
                              program, nearest_hint(name, "--", options_of(command))));
}

void insert(GivenValues& values, const std::string& name, GivenValue value) {
  const std::string option = value.option;
  if (!values.emplace(name, std::move(value)).second) {
    throw UserError(option + ": given twice");
  }
}

// A flag without a value is on.
std::string value_of(const po::option& option) {
  return option.value.empty() ? "true" : option.value.front();
}

void check_belongs(const OptionEntry& entry, Command command) {
  if (entry.belongs_to(command)) return;
  std::string owners;
  for (const Command owner : entry.uses.commands) {
    owners += fmt::format("{}annulus {}", owners.empty() ? "" : ", ", name_of(owner));
  }
  throw UserError(fmt::format("--{}: an option of {}, not of annulus {}", entry.name, owners,
                              name_of(command)));
}

GivenValues from_command_line(const std::vector<std::string>& words, Command command) {
  namespace style = po::command_line_style;
  po::parsed_options parsed(nullptr);
  const po::options_description known = descriptions();
  try {
    parsed = po::command_line_parser(words)
                 .options(known)
                 .style(style::allow_long | style::long_allow_adjacent | style::long_allow_next)
                 .allow_unregistered()
                 .run();
  } catch (const po::error_with_option_name& error) {
    const std::string name = error.get_option_name();
    const OptionEntry* const entry = find_option(
        std::string_view(name).substr(std::min(name.find_first_not_of('-'), name.size())));
    throw ArgumentError(name, "no value", entry == nullptr ? "a value" : entry->value);
  } catch (const po::error& error) {
    throw UserError(fmt::format("command line: {}", error.what()));
  }
  GivenValues values;
  for (const po::option& option : parsed.options) {
    if (option.position_key >= 0) {
      throw ArgumentError("command line", fmt::format("'{}'", value_of(option)),
                          "options, as --name value");
    }
    const std::string shown = "--" + option.string_key;
    const OptionEntry* const entry = find_option(option.string_key);
    if (option.unregistered || entry == nullptr) throw_unknown(shown, option.string_key, command);
    check_belongs(*entry, command);
    const std::string value = value_of(option);
    // Boost takes an unknown option after a flag for the flag's value.
    if (entry->is_flag() && value.starts_with("--")) {
      throw_unknown(value, std::string_view(value).substr(2), command);
    }
    // Boost takes the next option for a forgotten value.
    if (value.starts_with("--")) {
      const bool file = entry->value == "FILE";
      throw ArgumentError(shown, fmt::format("'{}', which looks like the next option", value),
                          file ? "FILE (./--name if that is its name)" : entry->value);
    }
    insert(values, entry->name, {shown, value});
  }
  return values;
}

bool is_option_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 || c == '-' || c == '_');
  });
}

// The text of the file. Each line must be empty, a comment, or name = value.
std::string read_config(const std::string& path) {
  const std::string shown = "--config " + path;
  std::istringstream file(as_option(shown, [&] { return files::read_text(path); }));
  std::string text;
  int number = 1;
  for (std::string line; std::getline(file, line); ++number) {
    const auto fail = [&](const char* problem) {
      throw FileError(shown, fmt::format("line {}: {}", number, problem));
    };
    if (std::any_of(line.begin(), line.end(), [](unsigned char c) {
          return std::iscntrl(c) != 0 && c != '\t' && c != '\r';
        })) {
      fail("is not text");
    }
    const std::string content = line.substr(0, line.find('#'));
    const std::size_t begin = content.find_first_not_of(" \t\r");
    if (begin != std::string::npos) {
      if (content[begin] == '[') fail("a [section], expected name = value");
      const std::string name = content.substr(begin, content.find_first_of(" \t=", begin) - begin);
      if (content.find('=') == std::string::npos || !is_option_name(name)) {
        fail("expected name = value");
      }
    }
    text += line + '\n';
  }
  return text;
}

GivenValues from_config(const GivenValue& config, Command command) {
  const std::string path = parse_name(config.option, config.text);
  const std::string text = read_config(path);
  std::istringstream file(text);
  GivenValues values;
  const po::options_description known = descriptions();
  po::parsed_options parsed(nullptr);
  try {
    parsed = po::parse_config_file(file, known, true);
  } catch (const po::error& error) {
    throw FileError("--config " + path, error.what());
  }
  for (const po::option& option : parsed.options) {
    const std::string shown = fmt::format("{} in {}", option.string_key, path);
    const OptionEntry* const entry = find_option(option.string_key);
    if (option.unregistered || entry == nullptr) throw_unknown(shown, option.string_key, command);
    if (entry->name == "config") throw FileError(path, "names a further --config");
    insert(values, entry->name, {shown, value_of(option)});
  }
  return values;
}

constexpr std::array<std::string_view, 9> kLogLevels{
    "trace", "debug", "info", "warning", "warn", "error", "err", "critical", "off"};

// The logger treats an unknown level as off.
void check_log_level(std::vector<std::string>& warnings) {
  std::string level = environment("ANNULUS_LOG_LEVEL");
  for (char& c : level) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (std::find(kLogLevels.begin(), kLogLevels.end(), level) != kLogLevels.end()) return;
  warnings.push_back(fmt::format(
      "ANNULUS_LOG_LEVEL: got '{}', taken as off; expected trace, debug, info, warning, error or "
      "off{}",
      level, nearest_hint(level, "", {kLogLevels.begin(), kLogLevels.end()})));
}

GivenValues from_environment(std::vector<std::string>& warnings) {
  GivenValues values;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::size_t equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    const std::string variable_name(text.substr(0, equals));
    const bool is_library = std::ranges::any_of(
        environment_variables(), [&](const auto& known) { return known.name == variable_name; });
    if (is_library || variable_name.starts_with(kMetadataPrefix)) continue;
    std::string name = variable_name.substr(kPrefix.size());
    for (char& c : name) {
      c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    const std::string value(text.substr(equals + 1));
    const OptionEntry* const entry = find_option(name);
    if (entry == nullptr) {
      warnings.push_back(fmt::format(
          "environment variable {} is ignored: it names no option (annulus info lists the "
          "variables)",
          variable_name));
    } else if (!value.empty()) {
      insert(values, name, {variable_name, value});
    }
  }
  return values;
}

// Drops options of other commands, as file and environment may serve several.
void drop_foreign(GivenValues& values, Command command) {
  std::erase_if(values, [command](const auto& item) {
    const OptionEntry& entry = *find_option(item.first);
    return !entry.belongs_to(command);
  });
}

// Drops a transport and GPU sharing of environment and files if ranks are on CPUs.
void settle_transport(Options& options) {
  const bool plan_assumes_cpu = options.command == Command::plan && options.device == "auto";
  const bool on_cpu = options.device == "cpu" || plan_assumes_cpu;
  if (on_cpu && !options.named.contains("transport")) options.transport = Transport::automatic;
  if (on_cpu && !options.named.contains("share-gpus")) options.share_gpus = false;
  if (options.share_gpus && options.transport == Transport::nccl) {
    throw ArgumentError("--transport", "nccl",
                        "auto, composite or peer with --share-gpus, as NCCL cannot have two ranks "
                        "of a node on a GPU");
  }
  if (on_cpu && options.transport != Transport::automatic) {
    throw UserError(fmt::format("--transport {}: {}", annulus::name_of(options.transport),
                                plan_assumes_cpu
                                    ? "needs --device cuda, as plan assumes CPU ranks"
                                    : "needs GPU ranks, so it cannot be given with --device cpu"));
  }
  if (on_cpu && options.share_gpus) {
    throw UserError("--share-gpus: needs GPU ranks, so it cannot be given with --device cpu");
  }
  if (options.share_gpus && options.transport == Transport::automatic) {
    options.transport = Transport::peer;
  }
}

// Checks --lse, --maximum and --sum.
void check_row_results(const Options& options) {
  const bool unnormalised = !options.normalize_output;
  if (unnormalised && !options.lse.empty()) {
    throw UserError(fmt::format(
        "--lse {}: cannot be given with --normalize-output false, which has --maximum and --sum "
        "instead: the LSE is maximum + log(sum)",
        options.lse));
  }
  for (const auto& [option, file] :
       {std::pair("--maximum", &options.maximum), std::pair("--sum", &options.sum)}) {
    if (!unnormalised && !file->empty()) {
      throw UserError(fmt::format("{} {}: needs --normalize-output false", option, *file));
    }
    if (unnormalised && file->empty() && options.command == Command::run) {
      throw ArgumentError(option, "nothing",
                          "a .npy or .safetensors file, without which an output of "
                          "--normalize-output false means nothing");
    }
  }
}

// Checks options against each other, as far as that needs neither files nor ranks.
void check_together(const Options& options) {
  const bool plan = options.command == Command::plan;
  const bool calibrates = !options.calibrate.empty();
  const auto refuse = [](bool together, const char* error) {
    if (together) throw UserError(error);
  };
  if (options.json == "-" && options.csv == "-") {
    throw ArgumentError("--csv", "'-'", "a file, as --json has standard output already");
  }
  refuse(!options.input.empty() &&
             !(options.query.empty() && options.key.empty() && options.value.empty()),
         "--input: replaces --query, --key and --value, so it cannot be given with them");
  refuse(options.scaling && (options.hops || calibrates),
         "--scaling: times attention calls, and --hops and --calibrate make none");
  refuse(options.transport == Transport::composite && calibrates,
         "--transport composite: --calibrate measures peer and nccl, of which it consists");
  refuse(options.hops && calibrates,
         "--hops: --calibrate measures the hops too, so the two cannot be given together");
  refuse(options.simulate + options.recommend + (plan && options.scaling) > 1,
         "--simulate, --recommend and --scaling: one at a time");
  refuse(options.random > 0 && options.random_case,
         "--random-case: repeats one problem, so it cannot be given with --random");
  check_row_results(options);
}

}  // namespace

const std::string* Options::given_value(std::string_view name) const {
  const auto found =
      std::ranges::find(given_values, name, &std::pair<std::string, std::string>::first);
  return found == given_values.end() ? nullptr : &found->second;
}

namespace {

Options options_from(const GivenValues& values, Command command) {
  Options options;
  options.command = command;
  for (const OptionEntry& entry : option_table()) {
    const auto found = values.find(entry.name);
    if (found == values.end()) continue;
    const GivenValue& value = found->second;
    if (value.is_none) continue;
    entry.apply(options, value.option, value.text);
    if (value.option.starts_with("--")) options.named.insert(entry.name);
    options.given_values.emplace_back(entry.name, value.text);
    options.given +=
        fmt::format("{}--{}={}", options.given.empty() ? "" : " ", entry.name, value.text);
  }
  check_together(options);
  check_effects(options);
  settle_transport(options);
  check_file_names(options);
  return options;
}

// --shape B,T,S gets the sizes of the model's heads.
void complete_shape(GivenValues& values, const ModelSizes& sizes) {
  const auto shape = values.find("shape");
  if (shape == values.end() || split(shape->second.text, ',').size() != 3) return;
  shape->second.text += fmt::format(",{},{},{}", sizes.heads, sizes.kv_heads, sizes.head_dim);
}

void check_sizes(const AttentionShape& shape, const ModelSizes& sizes) {
  const ModelSizes given{shape.heads, shape.kv_heads, shape.head_dim};
  if (given == sizes && shape.value_dim == sizes.head_dim) return;
  throw ArgumentError("--shape", to_string(given),
                      fmt::format("{} as in --model-config, or B,T,S alone", to_string(sizes)));
}

}  // namespace

std::string_view name_of(Command command) noexcept {
  constexpr std::array<std::string_view, kCommands.size()> kNames{"run", "verify", "bench", "plan",
                                                                  "info"};
  return kNames[static_cast<std::size_t>(command)];
}

std::optional<Options> parse_options(const std::vector<std::string>& words, std::string& help) {
  const auto is_help = [](const std::string& word) { return word == "--help" || word == "-h"; };
  if (words.empty() || is_help(words.front()) || words == std::vector<std::string>{"help"}) {
    help = program_help();
    return std::nullopt;
  }
  if (words.front() == "help") {
    if (words.size() > 2) {
      throw ArgumentError("command line", fmt::format("'{}'", words[2]), "annulus help COMMAND");
    }
    help = command_help(parse_command(words[1]));
    return std::nullopt;
  }
  if (words.front() == "--version") {
    help = fmt::format("annulus {}\n", kVersion);
    return std::nullopt;
  }
  const Command command = parse_command(words.front());
  if (std::any_of(words.begin() + 1, words.end(), is_help)) {
    help = command_help(command);
    return std::nullopt;
  }
  std::vector<std::string> warnings;
  GivenValues values = from_command_line({words.begin() + 1, words.end()}, command);
  GivenValues environment = from_environment(warnings);
  check_log_level(warnings);
  // merge() keeps existing values, so the first layer wins.
  drop_foreign(environment, command);
  GivenValues config;
  // The value of an option in the first layer that has it; null if none has.
  const auto given = [&](const char* name) -> const GivenValue* {
    for (const GivenValues* layer : {&values, &environment, &config}) {
      if (const auto found = layer->find(name); found != layer->end()) return &found->second;
    }
    return nullptr;
  };
  const auto is_on = [&](const char* flag) {
    const GivenValue* const value = given(flag);
    return value != nullptr && parse_flag(value->option, value->text);
  };
  if (const GivenValue* file = given("config")) {
    config = from_config(*file, command);
    drop_foreign(config, command);
  }
  MetadataValues metadata;
  if (find_option("metadata")->belongs_to(command)) {
    metadata = read_metadata(given("metadata"), is_on("metadata-lenient"));
    drop_foreign(metadata.file, command);
    drop_foreign(metadata.environment, command);
  }
  ModelValues model;
  if (find_option("model-config")->belongs_to(command)) {
    model = read_model(given("model-config"), given("layer"), command != Command::run);
  }
  values.merge(metadata.file);
  values.merge(model.values);
  if (model.sizes && !model.says_causal && given("causal") == nullptr) {
    throw UserError(
        fmt::format("--model-config {}: does not say whether its attention is causal (it has no "
                    "architectures): "
                    "give --causal, or --causal=false",
                    given("model-config")->text));
  }
  if (const auto& window = is_on("causal") ? model.causal_window : model.two_sided_window) {
    values.emplace("window", *window);
  }
  values.merge(environment);
  values.merge(metadata.environment);
  values.merge(config);
  // Two names of one setting: that of the command line counts.
  const auto is_named = [&](const char* name) {
    const auto found = values.find(name);
    return found != values.end() && found->second.option.starts_with("--");
  };
  if (is_named("deterministic") && !is_named("reproducible")) values.erase("reproducible");
  if (model.sizes) complete_shape(values, *model.sizes);
  Options options = options_from(values, command);
  if (model.sizes && options.shape) check_sizes(*options.shape, *model.sizes);
  options.model_sizes = model.sizes;
  warnings.insert(warnings.end(), metadata.warnings.begin(), metadata.warnings.end());
  if (model.has_sinks && options.sinks.empty()) {
    warnings.push_back("--model-config " + options.model_config +
                       ": lacks the sinks of the heads, which are among the model's weights: give "
                       "--sinks FILE");
  }
  options.warnings = std::move(warnings);
  return options;
}

}  // namespace annulus::launcher
