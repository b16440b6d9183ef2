#include <cstddef>
#include <cstring>
#include <cuda_runtime_api.h>
#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/cuda_memory.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device_guard.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

#include "peer/flags.hpp"
#include "peer/shared_memory.hpp"
#include "topology/node_identity.hpp"

namespace annulus {
namespace {

// Far more time than a working device needs.
constexpr Watchdog::Seconds kTrial{30};

/// The facts about a rank's device that it sends to the others.
struct Seat {
  std::string node;
  std::string bus_id;
  std::string error;  // why the rank has nothing to share
  peer::SharedAddress memory;
};

// Three lines of text, then the address in raw bytes.
std::string encoded(const Seat& seat) {
  static_assert(std::is_trivially_copyable_v<peer::SharedAddress>);
  std::string error = seat.error;
  for (char& c : error) c = c == '\n' ? ' ' : c;
  return seat.node + '\n' + seat.bus_id + '\n' + error + '\n' +
         std::string(reinterpret_cast<const char*>(&seat.memory), sizeof(seat.memory));
}

Seat decoded(const std::string& text) {
  Seat seat;
  std::size_t begin = 0;
  for (std::string* line : {&seat.node, &seat.bus_id, &seat.error}) {
    const std::size_t end = text.find('\n', begin);
    *line = text.substr(begin, end - begin);
    begin = end + 1;
  }
  std::memcpy(&seat.memory, text.data() + begin, sizeof(seat.memory));
  return seat;
}

// A device that this process does not see cannot be queried, so its memory is opened as a test.
bool access_is_denied(int device, const std::string& other_bus_id) {
  int other = 0;
  if (cudaDeviceGetByPCIBusId(&other, other_bus_id.c_str()) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  int possible = 1;
  check_cuda(cudaDeviceCanAccessPeer(&possible, device, other), "cudaDeviceCanAccessPeer");
  return possible == 0;
}

// Why this rank cannot reach the memory of another; "" if it can.
std::string obstacle_between(int rank, const Seat& mine, int device, int peer, const Seat& theirs) {
  for (const Seat* seat : {&mine, &theirs}) {
    if (!seat->error.empty()) return seat->error;
  }
  if (theirs.node != mine.node) {
    return fmt::format("ranks {} and {} are on different nodes", rank, peer);
  }
  try {
    if (theirs.bus_id != mine.bus_id && access_is_denied(device, theirs.bus_id)) {
      return fmt::format("the GPUs of ranks {} and {} ({} and {}) cannot access each other", rank,
                         peer, mine.bus_id, theirs.bus_id);
    }
    peer::PeerMappings trial(device);
    (void)trial.map(peer, theirs.memory);
  } catch (const Error& error) {
    return fmt::format("rank {}: {}", rank, error.what());
  }
  return "";
}

// One line of ranks, then the obstacle.
std::string encoded(const PeerReach::Finding& finding) {
  return fmt::format("{}\n{}", fmt::join(finding.reached, " "), finding.obstacle);
}

PeerReach::Finding finding_of(const std::string& text) {
  PeerReach::Finding finding;
  const std::size_t end = text.find('\n');
  std::istringstream ranks(text.substr(0, end));
  for (int rank = 0; ranks >> rank;) finding.reached.push_back(rank);
  finding.obstacle = text.substr(end + 1);
  return finding;
}

}  // namespace

PeerReach peer_copy_reach(Group& host, Place place) {
  Seat mine;
  // Lives until all ranks have tried to open it.
  std::optional<peer::SharedMemoryPool> pool;
  std::optional<peer::FlagBlock> flags;
  std::optional<DeviceGuard> guard;
  try {
    guard.emplace(place.device);
    mine.node = node_identity();
    mine.bus_id = cuda::bus_id(place.device);
    pool.emplace(place.device);
    flags.emplace(*pool, Watchdog(kTrial));
    mine.memory = peer::share(flags->take().address());
  } catch (const std::exception& error) {
    mine.error = fmt::format("rank {}: {}", host.mesh_rank(host.rank()), error.what());
  }
  std::vector<Seat> seats;
  for (const std::string& text : host.control().gather_text(encoded(mine), "memory to try")) {
    seats.push_back(decoded(text));
  }

  PeerReach::Finding finding{{}, mine.error};
  for (int other = 0; other < host.size(); ++other) {
    if (other == host.rank()) continue;
    const std::string obstacle =
        obstacle_between(host.mesh_rank(host.rank()), mine, place.device, host.mesh_rank(other),
                         seats[static_cast<std::size_t>(other)]);
    if (obstacle.empty()) {
      finding.reached.push_back(other);
    } else if (finding.obstacle.empty()) {
      finding.obstacle = obstacle;
    }
  }
  std::vector<PeerReach::Finding> findings;
  for (const std::string& text : host.control().gather_text(encoded(finding), "what ranks reach")) {
    findings.push_back(finding_of(text));
  }
  return PeerReach::from(findings);
}

}  // namespace annulus
