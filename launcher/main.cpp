#include <cctype>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/log.hpp>
#include <annulus/files/temporary_file.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/same_on_ranks.hpp"

namespace {

using namespace annulus;

int code(ExitCode exit_code) {
  return static_cast<int>(exit_code);
}

ExitCode dispatch(const launcher::CommandContext& context) {
  using launcher::Command;
  switch (context.options.command) {
    case Command::run:
      return launcher::run_command(context);
    case Command::verify:
      return launcher::verify_command(context);
    case Command::bench:
      return launcher::bench_command(context);
    case Command::plan:
      return launcher::plan_command(context);
    case Command::info:
      return launcher::info_command(context);
  }
  throw InternalError("a command that nobody runs");
}

// Every rank has its own environment and perhaps its own file system: they agree on what was asked
// for before anything starts.
std::optional<launcher::Options> agree_on_options(const MpiSession& session,
                                                  const std::vector<std::string>& words,
                                                  std::string& help) {
  const Watchdog watchdog{Watchdog::Seconds(launcher::Options().timeout)};
  Mesh everyone(MeshShape({{"ranks", session.size()}}), session.world(), watchdog);
  auto options =
      collectively(everyone.world(), [&] { return launcher::parse_options(words, help); });
  launcher::require_same(everyone.world(), "options", options ? options->given : help);
  return options;
}

ExitCode run_program(const MpiSession& session, const std::vector<std::string>& words) {
  const bool leader = session.rank() == 0;
  std::string help;
  const std::optional<launcher::Options> options = agree_on_options(session, words, help);
  if (!options) {
    if (leader) std::cout << help << std::flush;
    return ExitCode::success;
  }
  if (leader) launcher::print_warnings(options->warnings);
  return dispatch({session, *options, std::cout});
}

void print_error(const std::string& text) {
  // One write, so that the lines of two ranks do not mix.
  std::cerr << ("annulus: error: " + text + "\n") << std::flush;
}

bool names_its_rank(const std::string& text) {
  return text.starts_with("rank ") && text.size() > 5 &&
         std::isdigit(static_cast<unsigned char>(text[5])) != 0;
}

// A full disk must not pass for a result. Only rank 0 writes; the others need not know.
ExitCode with_output_written(ExitCode exit_code) {
  if (std::cout.flush()) return exit_code;
  print_error("standard output: cannot be written in full");
  return ExitCode::failure;
}

// Errors that all ranks share end the program in good order, with one message.
ExitCode guarded(const MpiSession& session, const std::vector<std::string>& words) {
  const auto shared = [&](const Error& error) {
    if (session.rank() == 0) print_error(error.what());
    return error.exit_code();
  };
  try {
    return with_output_written(run_program(session, words));
  } catch (const UserError& error) {
    return shared(error);
  } catch (const AgreedFailure& error) {
    return shared(error);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string who;
  try {
    const MpiSession session(&argc, &argv);
    files::remove_temporary_files_on_signals();  // MPI has set up its own handlers now
    if (session.size() > 1) {
      who = fmt::format("rank {}: ", session.rank());
      set_log_rank(session.rank());
    }
    try {
      return code(guarded(session, {argv + 1, argv + argc}));
    } catch (const std::exception& error) {
      // The other ranks do not know: they wait, and only the end of the job frees them.
      print_error(names_its_rank(error.what()) ? error.what() : who + error.what());
      abort_job(code(ExitCode::failure));
    }
  } catch (const std::exception& error) {
    print_error(error.what());
    return code(ExitCode::failure);
  }
}
