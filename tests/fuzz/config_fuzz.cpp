// Files for --config.

#include <array>
#include <string>

#include "fuzzing.hpp"
#include "launcher/options/options.hpp"

using namespace annulus;
using namespace annulus::launcher;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const InputFile input("input.conf");
  constexpr std::array kCommands{"run", "verify", "bench", "plan", "info"};
  input.set(text_of(data, size));
  // The length chooses, so that a change of it plays the same lines for another command.
  const char* const command = kCommands[size % kCommands.size()];
  std::string help;
  const auto options = taken([&] {
    return parse_options({command, "--config", input.path()}, help);
  });
  if (!options) return 0;
  require(options->has_value() && help.empty(), "a file asks for no help");
  require((*options)->config == input.path(), "a file names no other");
  require(name_of((*options)->command) == command, "a file changes no command");
  return 0;
}
