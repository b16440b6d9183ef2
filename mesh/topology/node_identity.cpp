#include "topology/node_identity.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <unistd.h>

#include <annulus/core/environment.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

// The node emulated by the environment; "" if there is none.
std::string pretended_node() {
  const std::string name = environment("ANNULUS_NODE");
  if (!std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
      })) {
    throw ArgumentError("ANNULUS_NODE", "'" + name + "'",
                        "a name of letters, digits, hyphens, underscores and dots");
  }
  return name;
}

}  // namespace

std::string node_identity() {
  const std::string pretended = pretended_node();
  return pretended.empty() ? machine_identity() : machine_identity() + ' ' + pretended;
}

std::string node_name() {
  const std::string pretended = pretended_node();
  return pretended.empty() ? host_name() : pretended;
}

std::string machine_identity() {
  // New at every boot.
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  return std::getline(file, id) && !id.empty() ? id : host_name();
}

std::string host_name() {
  std::array<char, 256> host{};
  return gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "localhost";
}

}  // namespace annulus
