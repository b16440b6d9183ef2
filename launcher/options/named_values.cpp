#include "launcher/options/named_values.hpp"

#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/metadata.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/options/nearest.hpp"
#include "launcher/options/option_values.hpp"

namespace annulus::launcher {

std::string parse_spec(const std::string& option, const std::string& text) {
  try {
    static_cast<void>(PartitionSpec::parse(text, option));
  } catch (const DuplicateSpecError& error) {
    throw UserError(fmt::format("{}: {}", option, error.what()));
  }
  return text;
}

std::string parse_schedule_name(const std::string& option, const std::string& text) {
  if (text == "auto") return text;
  try {
    static_cast<void>(ring::parse_schedule(text));
  } catch (const ArgumentError& error) {
    const std::string nearest = nearest_hint(text, "", split_names(error.expected()));
    throw ArgumentError(option, error.value(), error.expected() + nearest);
  }
  return text;
}

std::string parse_implementation_name(const std::string& option, const std::string& text) {
  if (text == "auto") return text;
  const Registry registry = Registry::standard();
  try {
    registry.check_name(text);
  } catch (const ArgumentError& error) {
    throw ArgumentError(option, fmt::format("'{}'", text),
                        error.expected() + nearest_hint(text, "", registry.names()));
  }
  return text;
}

std::string parse_mode_name(const std::string& option, const std::string& text) {
  std::vector<std::string> names;
  names.reserve(kAttentionModes.size());
  for (const AttentionMode mode : kAttentionModes) names.emplace_back(annulus::name_of(mode));
  return parse_choice(option, text, names);
}

Transport parse_transport_name(const std::string& option, const std::string& text) {
  const std::vector<std::string_view> names = transport_choices();
  return annulus::parse_transport(
      parse_choice(option, text, std::vector<std::string>(names.begin(), names.end())));
}

}  // namespace annulus::launcher
