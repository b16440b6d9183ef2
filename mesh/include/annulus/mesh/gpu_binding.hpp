#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/mesh/control.hpp>
#include <annulus/mesh/topology.hpp>

namespace annulus {

/// The GPUs that one rank sees.
struct VisibleGpus {
  std::vector<std::string> identities;  ///< of its devices, in order of their indices: the same
                                        ///< for every process that sees the device
  std::string missing;                  ///< why it sees none; "" if it does
  bool broken = false;                  ///< GPUs seem to be there but cannot be used
};

/// Which GPU each rank computes with.
struct GpuBinding {
  std::vector<int>
      device_of_rank;    ///< index among those that the rank sees; empty with an obstacle
  std::string obstacle;  ///< why there is not one for every rank
  bool any = false;      ///< whether any rank has GPUs, usable or not
};

/// Gives every rank its own GPU, whether the ranks of a node see all of its GPUs, some, or one
/// each; with `share`, ranks share the GPUs that they see. `visible` is by rank. The result depends
/// on the arguments alone, so all ranks decide the same.
[[nodiscard]] GpuBinding bind_gpus(const Topology& topology,
                                   const std::vector<VisibleGpus>& visible, bool share);
/// The same for the GPUs there are. Ranks on one machine take different ones even if ANNULUS_NODE
/// splits it into nodes. Collective over `ranks`.
[[nodiscard]] GpuBinding bind_gpus(Control& ranks, bool share);

/// Two ranks that compute on the same GPU, if there are any; `device` is the index of this rank's.
/// Collective over `ranks`.
[[nodiscard]] std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device);
/// The same if ranks are on one machine that give the same `machine`.
[[nodiscard]] std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device,
                                                                  const std::string& machine);

}  // namespace annulus
