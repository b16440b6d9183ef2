#include "launcher/options/option_help.hpp"

#include <array>
#include <sstream>
#include <string_view>

#include <boost/program_options.hpp>
#include <fmt/format.h>

#include "launcher/options/option_table.hpp"

namespace annulus::launcher {
namespace {

namespace po = boost::program_options;

constexpr unsigned kLineLength = 100;
constexpr unsigned kDescriptionLength = 70;

struct CommandText {
  Command command;
  std::string_view summary;
  std::string_view usage;
  std::string_view example;  ///< to be pasted, one command a line
};

constexpr std::array<CommandText, 5> kCommands{{
    {Command::run, "attention over tensors in files; every rank reads and writes just its slices",
     "[mpirun -n RANKS] annulus run --query FILE --key FILE --value FILE --output FILE [options]",
     "mpirun -n 4 annulus run --mesh sp=4 --causal --query q.npy --key k.npy --value v.npy "
     "--output o.npy\n"},
    {Command::verify,
     "makes a problem, computes it sharded and compares the result with a float64 oracle",
     "[mpirun -n RANKS] annulus verify --shape SIZES | --random N | --random-case SEED:INDEX "
     "[options]",
     "mpirun -n 4 annulus verify --shape 1,1k,1k,8,2,64 --causal --backward\n"
     "mpirun -n 8 annulus verify --random 200 --seed 1\n"},
    {Command::bench, "times sharded attention over random tensors",
     "[mpirun -n RANKS] annulus bench --shape SIZES [--sweep BEGIN:END] [options]",
     "mpirun -n 8 --bind-to none annulus bench --device gpu --dtype bf16 --causal "
     "--shape 1,0,0,64,8,128 --sweep 8k:128k:4\n"},
    {Command::plan,
     "shows what every rank would do, for any number of ranks; one process, without mpirun",
     "annulus plan --mesh AXES --shape SIZES [options]",
     "annulus plan --mesh sp=32 --ranks-per-node 8 --device gpu --dtype bf16 --causal "
     "--shape 1,1M,1M,64,8,128\n"},
    {Command::info, "shows versions, devices, implementations, environment",
     "[mpirun -n RANKS] annulus info [options]", "mpirun -n 4 annulus info\n"},
}};

}  // namespace

std::string program_help() {
  std::string text =
      "annulus: exact attention over sequences sharded across MPI ranks\n\n"
      "usage: [mpirun -n RANKS] annulus COMMAND [options]\n\n";
  for (const CommandText& entry : kCommands) {
    text += fmt::format("  {:<8}{}\n", name_of(entry.command), entry.summary);
  }
  text +=
      "\n  annulus help COMMAND    lists a command's options\n"
      "  annulus --version       prints the version\n\n"
      "Exit codes: 0 success, 2 usage or input, 3 failure while running, 4 wrong numbers (1 is "
      "mpirun's).\nAfter an error, mpirun adds lines of its own; mpirun --quiet adds none.\n";
  return text;
}

std::string command_help(Command command) {
  std::ostringstream out;
  for (const CommandText& entry : kCommands) {
    if (entry.command != command) continue;
    out << fmt::format("annulus {}: {}\n\nusage: {}\n\nexample:\n{}", name_of(command),
                       entry.summary, entry.usage, entry.example);
  }
  // One description per group. Groups come in order, and the options of a group are contiguous.
  const std::vector<OptionEntry>& table = option_table();
  for (auto entry = table.begin(); entry != table.end();) {
    const std::string& group = entry->group;
    po::options_description description(group, kLineLength, kDescriptionLength);
    bool any = false;
    for (; entry != table.end() && entry->group == group; ++entry) {
      if (!entry->belongs_to(command)) continue;
      any = true;
      if (entry->is_flag()) {
        description.add_options()(entry->name.c_str(), entry->help.c_str());
      } else {
        description.add_options()(entry->name.c_str(),
                                  po::value<std::string>()->value_name(entry->value),
                                  entry->help.c_str());
      }
    }
    if (any) out << '\n' << description;
  }
  out << "\nEvery option can also come from the environment (ANNULUS_WINDOW=100,0) or the --config "
         "file\n"
         "(window = 100,0); the command line overrides the environment, which overrides the "
         "file.\nA flag can be switched off: --causal=false. If the other options leave an option "
         "without\neffect, it is an error on the command line, but not in the environment or the "
         "file.\nAn option that needs another option accepts any value of the other one: "
         "--dropout 0 --seed 7.\n";
  return out.str();
}

}  // namespace annulus::launcher
