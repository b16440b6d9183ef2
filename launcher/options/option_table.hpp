#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// One option of the program, for parsing, precedence and help.
struct OptionEntry {
  /// Sets the field of Options from text. `option` is how the user gave it, for messages.
  using Apply = std::function<void(Options&, const std::string& option, const std::string& text)>;

  std::string group;  ///< heading in the help
  std::string name;   ///< without the dashes
  std::string value;  ///< placeholder in the help; empty: a flag
  std::string help;   ///< units and default included
  std::vector<Command> commands;
  Apply apply;

  [[nodiscard]] bool is_flag() const { return value.empty(); }
  [[nodiscard]] bool belongs_to(Command command) const;
};

/// Every option, in order of the help. (--help and --version are not options: they exist only on
/// the command line.)
[[nodiscard]] const std::vector<OptionEntry>& option_table();
/// Null if there is none.
[[nodiscard]] const OptionEntry* find_option(std::string_view name);

}  // namespace annulus::launcher
