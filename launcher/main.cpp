#include <algorithm>
#include <array>
#include <cctype>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/log.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/launched.hpp>
#include <annulus/mesh/mesh.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/commit.hpp"
#include "launcher/options/option_values.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/same_on_ranks.hpp"

namespace {

using namespace annulus;
using launcher::print_error;

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
  throw InternalError("a command without a function");
}

// Reads --timeout or ANNULUS_TIMEOUT before the options, because starting needs a limit too. Errors
// in the value are reported later.
Watchdog::Seconds start_timeout(const std::vector<std::string>& words) {
  std::string text;
  if (const char* variable = std::getenv("ANNULUS_TIMEOUT"); variable != nullptr) text = variable;
  constexpr std::string_view kOption = "--timeout";
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == kOption && i + 1 < words.size()) text = words[i + 1];
    if (words[i].starts_with(std::string(kOption) + "="))
      text = words[i].substr(kOption.size() + 1);
  }
  return Watchdog::Seconds(launcher::seconds_of_text(text).value_or(launcher::Options().timeout));
}

// True for help, for the version, and if no command was given.
bool asks_for_help(const std::vector<std::string>& words) {
  return words.empty() || words.front() == "help" ||
         std::any_of(words.begin(), words.end(), [](const std::string& word) {
           return word == "--help" || word == "-h" || word == "--version";
         });
}

// True for plans and help texts, which need neither other processes nor MPI.
bool needs_one_process(const std::vector<std::string>& words) {
  return asks_for_help(words) || words.front() == launcher::name_of(launcher::Command::plan);
}

bool writes_files(const std::vector<std::string>& words) {
  constexpr std::array<std::string_view, 3> kReports{"--json", "--csv", "--trace"};
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    const std::string_view name = std::string_view(word).substr(0, word.find('='));
    return std::find(kReports.begin(), kReports.end(), name) != kReports.end();
  });
}

// Leaves work for one process to the first of several that were started together. Returns the exit
// code of this process if it is another one. Without a launcher of MPI programs, this process may
// be the only one that runs annulus, so it prints help, and refuses a plan.
std::optional<ExitCode> left_to_first(const std::vector<std::string>& words) {
  if (!needs_one_process(words)) return {};
  const auto process = process_number([](const char* name) { return std::getenv(name); });
  if (!process || process->number == 0) return {};
  const std::string note =
      fmt::format("{}={}: process 0 does this for all", process->variable, process->number);
  if (process->of_mpi) {
    if (!asks_for_help(words) && writes_files(words)) std::cerr << "annulus: " + note + '\n';
    return ExitCode::success;
  }
  if (asks_for_help(words)) return {};
  print_error(fmt::format("{}; unset {} to do it in this one", note, process->variable));
  return ExitCode::usage;
}

// Every rank has its own environment and perhaps its own file system, so ranks first agree on the
// command and the options.
std::optional<launcher::Options> agree_on_options(const MpiSession& session,
                                                  const std::vector<std::string>& words,
                                                  std::string& help) {
  const Watchdog watchdog{start_timeout(words)};
  Mesh everyone(MeshShape({{"ranks", session.size()}}), session.world(), watchdog);
  auto options =
      collectively(everyone.world(), [&] { return launcher::parse_options(words, help); });
  const auto asked = [&] {
    return fmt::format("{} {}", launcher::name_of(options->command), options->given);
  };
  launcher::require_same(everyone.world(), "command and options", options ? asked() : help);
  return options;
}

void set_log_rank(const MpiSession& session) {
  if (session.size() > 1) annulus::set_log_rank(session.rank());
}

ExitCode run_program(MpiSession& session, const std::vector<std::string>& words) {
  const bool leader = session.rank() == 0;  // it stays first in any order
  std::string help;
  std::optional<launcher::Options> options = agree_on_options(session, words, help);
  if (!options) {
    // Without a command, the usage is printed as an error.
    if (leader) (words.empty() ? std::cerr : std::cout) << help << std::flush;
    return words.empty() ? ExitCode::usage : ExitCode::success;
  }
  options->build = launcher::commit();
  if (leader) launcher::print_warnings(options->warnings);
  if (options->rank_order == "node") {
    session.number_by_node(Watchdog(Watchdog::Seconds(options->timeout)));
    set_log_rank(session);
  }
  launcher::begin_step(fmt::format("annulus {} was starting", launcher::name_of(options->command)));
  return dispatch({session, *options, std::cout, launcher::commit()});
}

// Adds the program's current step to the message of a timeout, which itself says for whom and why
// the rank waited.
std::string with_step(const std::exception& error) {
  const std::string text = text_of(error);
  const std::string_view step = launcher::current_step();
  if (dynamic_cast<const TimeoutError*>(&error) == nullptr || step.empty()) return text;
  return fmt::format("{}, while {}", text, step);
}

bool names_its_rank(const std::string& text) {
  return text.starts_with("rank ") && text.size() > 5 &&
         std::isdigit(static_cast<unsigned char>(text[5])) != 0;
}

// A full disk must not look like success. Only rank 0 writes; the others need not know.
ExitCode with_output_written(ExitCode exit_code) {
  if (std::cout.flush()) return exit_code;
  print_error("standard output: cannot be written in full");
  return ExitCode::failure;
}

// Errors on which all ranks agree end the program in an orderly way, with one message.
ExitCode guarded(MpiSession& session, const std::vector<std::string>& words) {
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
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond `ulimit -f` fails with EFBIG instead
  try {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (const auto exit_code = left_to_first(words)) return static_cast<int>(*exit_code);
    const Watchdog::Seconds timeout = start_timeout(words);
    // At least this long at the start: processes do not start at the same moment.
    constexpr Watchdog::Seconds kStart{30};
    MpiSession session = needs_one_process(words)
                             ? MpiSession::alone()
                             : MpiSession(&argc, &argv, std::max(timeout, kStart), print_error);
    launcher::handle_interruptions(session.rank() == 0);  // MPI has set up its own handlers now
    set_log_rank(session);
    try {
      const ExitCode exit_code = guarded(session, words);
      launcher::end_steps();
      session.finish(Watchdog(timeout));
      return static_cast<int>(exit_code);
    } catch (const std::exception& error) {
      // The other ranks do not know of the error and wait, so the job must be ended.
      const std::string text = with_step(error);
      const bool alone = session.size() == 1 || names_its_rank(text);
      print_error(alone ? text : fmt::format("{}: {}", session.rank_name(), text));
      abort_job(static_cast<int>(ExitCode::failure));
    }
  } catch (const std::exception& error) {
    print_error(text_of(error));
    return static_cast<int>(ExitCode::failure);
  }
}
