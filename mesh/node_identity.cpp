#include "node_identity.hpp"

#include <array>
#include <fstream>
#include <unistd.h>

namespace annulus {

std::string node_identity() {
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
