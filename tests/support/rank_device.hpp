#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include <annulus/core/cuda.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {

/// The GPU of this rank of the test program: ranks that outnumber the GPUs of their node share
/// them. Null, with the reason, where there is none.
struct RankDevice {
  std::unique_ptr<Device> device;
  std::unique_ptr<CurrentDevice> current;  ///< it is, as long as this lives
  bool shared = false;                     ///< there are more ranks on the node than GPUs
  std::string missing;
};

/// Collective over the ranks of the program.
[[nodiscard]] inline RankDevice open_rank_device() {
  const Mesh everyone(MeshShape({{"ranks", session().size()}}), session().world(), kWatchdog);
  const Topology& topology = everyone.topology();
  if (std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return {nullptr, nullptr, false, std::move(reason)};
  }
  const int gpus = static_cast<int>(cuda_devices().size());
  const auto rank = static_cast<std::size_t>(session().rank());
  std::unique_ptr<Device> device = make_cuda_device(topology.local_rank_of_rank[rank] % gpus);
  std::unique_ptr<CurrentDevice> current = device->make_current();
  return {std::move(device), std::move(current),
          topology.ranks_on_node(topology.node_of_rank[rank]) > gpus, ""};
}

}  // namespace annulus::test
