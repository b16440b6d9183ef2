#pragma once

#include <iostream>
#include <string>
#include <vector>

namespace annulus::launcher {

/// What the user should know though it is no error, on standard error. For one rank.
inline void print_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) std::cerr << "annulus: warning: " + warning + '\n';
}

}  // namespace annulus::launcher
