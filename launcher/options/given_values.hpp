#pragma once

#include <map>
#include <string>

namespace annulus::launcher {

/// A value and its source: "--window", "window in run.cfg".
struct GivenValue {
  std::string option;
  std::string text;
  bool is_none = false;  ///< an explicit none: the default, which overrides weaker sources
};

/// By the option's name.
using GivenValues = std::map<std::string, GivenValue>;

}  // namespace annulus::launcher
