#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The kind of file that an option's value names for writing.
enum class Writes : std::uint8_t {
  nothing,   ///< or the option names no file
  result,    ///< of the forward pass: several may share a .safetensors file
  gradient,  ///< likewise, but not with results of the forward pass
  array,     ///< in a file of its own
  text,
  report,  ///< "-" is standard output
};

/// The commands that take an option, and the forms of them in which it has an effect.
struct OptionUses {
  std::vector<Command> commands;
  /// verify --random draws its value, so it cannot be given on the command line too. The
  /// environment or a file may give it, but only its default value, if it has one.
  bool drawn = false;
  bool with_hops = false;  ///< bench --hops uses it
  /// False if bench --calibrate ignores it: that times kernels on blocks of its own, on one rank.
  bool with_calibrate = true;
  Writes writes = Writes::nothing;
};

/// One option of the program, for parsing, precedence and help.
struct OptionEntry {
  /// Sets the field of Options from text. `option` is how the user gave it, for messages.
  using Apply = std::function<void(Options&, const std::string& option, const std::string& text)>;

  std::string group;  ///< heading in the help
  std::string name;   ///< without the dashes
  std::string value;  ///< placeholder in the help; empty: a flag
  std::string help;   ///< units and default included
  OptionUses uses;
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
