#pragma once

#include <map>
#include <string>
#include <string_view>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// An option that was given.
struct GivenOption {
  std::string text;              ///< its value
  bool on_command_line = false;  ///< rather than in the environment or a file
  bool switched_off = false;     ///< a flag, as --causal=false
};
/// By name, without dashes.
using GivenOptions = std::map<std::string_view, GivenOption>;

/// Throws UserError for an option of the command line that the other options leave without effect.
/// The message names the option and its value, the cause, and what would give it an effect. Options
/// of environment and files are not checked, as they may be meant for other commands. But what
/// --random draws must not be given there either, unless with its default.
///
/// An option that needs another one is taken if the other is given with whatever value, so that a
/// script may try values that switch the other off: --seed 7 goes with --dropout 0.1 and with
/// --dropout 0. Values count only in --schedule, --impl and options that choose a form of a command
/// (--simulate, --hops). A flag that is switched off asks for nothing, and is never refused.
void check_effects(const Options& options, const GivenOptions& given);

}  // namespace annulus::launcher
