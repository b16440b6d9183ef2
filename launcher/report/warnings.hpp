#pragma once

#include <iostream>
#include <string>
#include <vector>

namespace annulus::launcher {

/// Prints warnings on standard error. For one rank.
inline void print_warnings(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) std::cerr << "annulus: warning: " + warning + '\n';
}

/// Prints an error on standard error, in one write, so that the lines of two ranks do not mix.
inline void print_error(const std::string& text) {
  std::cerr << ("annulus: error: " + text + "\n") << std::flush;
}

}  // namespace annulus::launcher
