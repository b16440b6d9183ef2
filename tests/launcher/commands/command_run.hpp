#pragma once

#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "launcher/commands/commands.hpp"
#include "tests/launcher/options/parsing.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::launcher {

inline int ranks() {
  return test::session().size();
}
inline bool leader() {
  return test::session().rank() == 0;
}

/// The exit code of a command, and its standard output.
struct Outcome {
  ExitCode code;
  std::string out;

  /// The JSON that rank 0 wrote; null on other ranks.
  [[nodiscard]] nlohmann::json json() const {
    return leader() ? nlohmann::json::parse(out) : nlohmann::json();
  }
  /// The first row of that report.
  [[nodiscard]] nlohmann::json row() const {
    return leader() ? json().at("rows").at(0) : nlohmann::json();
  }
};

/// Runs a command on the CPUs of all ranks. `line` has its options.
template <class Function>
Outcome run_on_cpus(const char* name, const Function& function, const std::string& line) {
  const Options options =
      parse(std::string(name) + " --device cpu" + (line.empty() ? "" : " ") + line);
  std::ostringstream out;
  const ExitCode code = function({test::session(), options, out});
  return {code, out.str()};
}

}  // namespace annulus::launcher
