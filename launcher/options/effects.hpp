#pragma once

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Throws UserError for an option of the command line that the other options leave without effect.
/// The message names the option and its value, the cause, and what would give it an effect. Options
/// of environment and files are not checked, as they may be meant for other commands, except that
/// options whose values --random draws must have their defaults there.
///
/// An option that needs another one is accepted with any value of that one, so that a script can
/// try values that switch it off: --seed 7 goes with --dropout 0.1 and with --dropout 0. Values
/// count only for --schedule, --impl and options that choose a form of a command (--simulate,
/// --hops). A flag that is switched off is never refused.
void check_effects(const Options& options);

}  // namespace annulus::launcher
