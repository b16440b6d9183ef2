#include "launcher/setup/open_context.hpp"

#include <array>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/log.hpp>
#include <annulus/ring/machine.hpp>

#include "launcher/report/report.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

ContextOptions context_options(const Options& options, const MeshShape& mesh) {
  ContextOptions asked;
  asked.mesh = mesh.axes().empty() ? "" : to_string(mesh);
  if (options.device == "cpu") {
    asked.place = Place::host();
  } else {
    asked.devices = options.device == "cuda" ? DeviceRule::gpus : DeviceRule::assigned;
  }
  asked.share_gpus = options.share_gpus;
  asked.transport = options.transport;
  asked.timeout = options.timeout;
  asked.threads = options.threads;
  return asked;
}

// Rethrows an error of the library, which names what was asked for, under the option of that name.
[[noreturn]] void throw_as_option(const std::string& message) {
  constexpr std::array<std::string_view, 3> kAsked{"device ", "share-gpus:", "transport "};
  constexpr std::string_view kSomeGpus = "device auto:";
  for (const std::string_view asked : kAsked) {
    if (!message.starts_with(asked)) continue;
    const bool some = message.starts_with(kSomeGpus);
    throw UnsupportedError(
        fmt::format("--{}{}", message, some ? " (--device cpu computes without them)" : ""));
  }
  throw;
}

}  // namespace

std::unique_ptr<Context> open_context(const CommandContext& command, const MeshShape& mesh) {
  std::unique_ptr<Context> context;
  try {
    context =
        std::make_unique<Context>(command.session.world(), context_options(command.options, mesh));
  } catch (const UserError& error) {
    throw_as_option(error.what());
  }
  const std::string found = fmt::format("computes on {} ({})", to_string(context->place()),
                                        device_name(context->place()));
  if (context->rank() != 0) {
    log_debug("{}", found);
    return context;
  }
  log_info("mesh {}: {} on {}", to_string(mesh), counted(context->size(), "rank"),
           counted(context->mesh().topology().nodes(), "node"));
  log_info("{}", found);
  return context;
}

std::unique_ptr<Context> open_context(const CommandContext& command) {
  return open_context(command, set_up_mesh(command.options, command.session.size()));
}

}  // namespace annulus::launcher
