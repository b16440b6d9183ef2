#pragma once

#include <iostream>
#include <string>
#include <vector>

namespace annulus::launcher {

/// Prints warnings on standard error. For one rank.
inline void print_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) std::cerr << "annulus: warning: " + warning + '\n';
}

}  // namespace annulus::launcher
