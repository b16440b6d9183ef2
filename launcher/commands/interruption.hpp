#pragma once

#include <string_view>

namespace annulus::launcher {

/// From now on SIGINT, SIGTERM and SIGHUP remove the temporary files of this process before they
/// end it as usual; if `speaks`, they also say on standard error what was interrupted. Signals that
/// are ignored or handled already are left alone. (On Ctrl-C, or when a rank dies, mpirun sends the
/// ranks SIGTERM.) This state is global to the process.
void handle_interruptions(bool speaks);

/// Names the step that begins now, to complete "interrupted while …": "annulus run was
/// computing". Long texts are cut.
void begin_step(std::string_view what) noexcept;
/// The present step, for messages; empty before the first. Valid until the next begin_step().
[[nodiscard]] std::string_view current_step() noexcept;
/// Everything has been said: a signal from now on ends the process without a word. (mpirun sends
/// SIGTERM to ranks that are slower to leave than one with an error.)
void end_steps() noexcept;

}  // namespace annulus::launcher
