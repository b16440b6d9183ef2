#include <array>
#include <cstdlib>

#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

constexpr std::array kVariables{
    EnvironmentVariable{
        "ANNULUS_LOG_LEVEL", "off",
        "level of the log on standard error: off, info (the main steps), debug (every choice)"},
    EnvironmentVariable{"ANNULUS_FORCE_NATIVE", "0",
                        "1: the native implementation runs under any --impl"},
    EnvironmentVariable{"ANNULUS_NODE", "",
                        "a name: the rank counts as one on a node of that name, for tests and "
                        "experiments with several nodes on one machine"},
};

}  // namespace

std::span<const EnvironmentVariable> environment_variables() {
  return kVariables;
}

std::string environment(std::string_view name) {
  for (const auto& variable : kVariables) {
    if (variable.name != name) continue;
    const char* value = std::getenv(variable.name.data());
    return value != nullptr ? std::string(value) : std::string(variable.default_value);
  }
  throw InternalError("environment variable " + std::string(name) + " is not in the table");
}

bool environment_flag(std::string_view name) {
  const std::string value = environment(name);
  for (const char* off : {"", "0", "off", "false", "no"}) {
    if (value == off) return false;
  }
  for (const char* on : {"1", "on", "true", "yes"}) {
    if (value == on) return true;
  }
  throw UserError(std::string(name) + ": got '" + value + "', expected 0 or 1");
}

}  // namespace annulus
