#pragma once

#include <string>
#include <string_view>

namespace annulus::launcher {

/// From now on SIGINT, SIGTERM and SIGHUP remove the temporary files of this process before they
/// end it; if `speaks`, they also say on standard error what was interrupted. Signals that are
/// already ignored or handled are left alone. (On Ctrl-C, or when a rank dies, mpirun sends the
/// ranks SIGTERM.) This state is global to the process.
void handle_interruptions(bool speaks);

/// Names the step that begins now, for the message of an interruption: "annulus run was computing".
/// Long texts are cut.
void begin_step(std::string_view what) noexcept;
/// The current step, for messages; empty before the first. Valid until the next begin_step().
[[nodiscard]] std::string_view current_step() noexcept;
/// From now on, a signal prints this text on standard output before it ends the process. The text
/// replaces an earlier one; "" for none.
void print_when_interrupted(std::string text);
/// From now on, the message of an interruption says that the finished rows of a report are "kept",
/// or "kept in a.json.unfinished", as `how` says; if it is empty, that no unfinished file is left.
void rows_are_kept(std::string_view how) noexcept;

/// From now on a signal ends the process without a message. (mpirun sends SIGTERM to ranks that
/// leave later than one with an error.)
void end_steps() noexcept;

}  // namespace annulus::launcher
