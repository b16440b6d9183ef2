#pragma once

#include <string_view>

namespace annulus::launcher {

/// From now on SIGINT, SIGTERM and SIGHUP remove the temporary files of this process before they end
/// it as ever; if `speaks`, they also say on standard error what was interrupted. Signals that are
/// ignored or handled already are left alone. (On Ctrl-C, or when a rank dies, mpirun sends the ranks
/// SIGTERM.) Such state belongs to the process: there is one of it.
void handle_interruptions(bool speaks);

/// What the program does from now on, as it completes "interrupted while …": "reading the input
/// files". Long texts are cut.
void begin_step(std::string_view what) noexcept;

}  // namespace annulus::launcher
