#include <string>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {

std::string_view name_of(Transport transport) noexcept {
  switch (transport) {
    case Transport::automatic:
      return "auto";
    case Transport::nccl:
      return "nccl";
    case Transport::peer:
      return "peer";
  }
  return "?";
}

Transport parse_transport(std::string_view name) {
  for (const Transport transport : {Transport::automatic, Transport::nccl, Transport::peer}) {
    if (name == name_of(transport)) return transport;
  }
  throw ArgumentError("transport", "'" + std::string(name) + "'", "auto, nccl or peer");
}

}  // namespace annulus
