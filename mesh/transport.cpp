#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>

#include "composite/traits.hpp"
#include "mpi/traits.hpp"
#include "nccl/traits.hpp"
#include "peer/traits.hpp"
#include "self/traits.hpp"

namespace annulus {
namespace {

// All transports; those between GPUs in order of preference.
constexpr std::array kTransports{&kSelfTraits, &kMpiTraits, &kPeerTraits, &kCompositeTraits,
                                 &kNcclTraits};
constexpr std::string_view kAutomatic = "auto";

// "a, b or c".
std::string alternatives(const std::vector<std::string_view>& names) {
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

const TransportTraits* find(Transport transport) noexcept {
  for (const TransportTraits* traits : kTransports) {
    if (traits->choice == transport) return traits;
  }
  return nullptr;
}

}  // namespace

std::span<const TransportTraits* const> transports() noexcept {
  return kTransports;
}

std::vector<Transport> device_transports() {
  std::vector<Transport> choices;
  for (const TransportTraits* traits : kTransports) {
    if (traits->choice != Transport::automatic) choices.push_back(traits->choice);
  }
  return choices;
}

std::vector<Transport> device_transports(PeerExtent extent) {
  std::vector<Transport> choices = device_transports();
  if (extent != PeerExtent::all) std::erase(choices, Transport::peer);
  if (extent != PeerExtent::some) std::erase(choices, Transport::composite);
  return choices;
}

const TransportTraits& transport_traits(std::string_view name) {
  const auto found = std::ranges::find(kTransports, name, &TransportTraits::name);
  if (found != kTransports.end()) return **found;
  std::vector<std::string_view> known;
  for (const TransportTraits* traits : kTransports) known.push_back(traits->name);
  throw ArgumentError("transport", fmt::format("'{}'", name), alternatives(known));
}

const TransportTraits& transport_traits(Transport transport) {
  const TransportTraits* const traits =
      transport == Transport::automatic ? nullptr : find(transport);
  if (traits == nullptr) throw InternalError("traits of transport auto, before it is chosen");
  return *traits;
}

std::string_view name_of(Transport transport) noexcept {
  if (transport == Transport::automatic) return kAutomatic;
  const TransportTraits* const traits = find(transport);
  return traits == nullptr ? "?" : traits->name;
}

std::vector<std::string_view> transport_choices() {
  std::vector<std::string_view> names{kAutomatic};
  for (const Transport transport : device_transports()) names.push_back(name_of(transport));
  std::sort(names.begin() + 1, names.end());
  return names;
}

Transport parse_transport(std::string_view name) {
  if (name == kAutomatic) return Transport::automatic;
  for (const Transport transport : device_transports()) {
    if (name == name_of(transport)) return transport;
  }
  throw ArgumentError("transport", fmt::format("'{}'", name), alternatives(transport_choices()));
}

}  // namespace annulus
