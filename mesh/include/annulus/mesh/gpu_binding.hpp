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
  std::vector<std::string> identities;  ///< of its devices, in order of their indices; the same
                                        ///< in every process that sees the device
  std::string missing;                  ///< why it sees none; "" if it does
  bool broken = false;                  ///< GPUs seem to be there but cannot be used
};

/// The GPU of each rank.
struct GpuBinding {
  std::vector<int>
      device_of_rank;    ///< index among the GPUs that the rank sees; empty with an obstacle
  std::string obstacle;  ///< why some rank has none
  bool any = false;      ///< some rank has GPUs, usable or not
};

/// Gives every rank its own GPU, whether the ranks of a node see all of its GPUs, some, or one
/// each; with `share`, ranks share the GPUs that they see. `visible` is by rank. The result depends
/// on the arguments alone, so all ranks decide the same.
[[nodiscard]] GpuBinding bind_gpus(const Topology& topology,
                                   const std::vector<VisibleGpus>& visible, bool share);
/// Gives every rank a GPU of this job's machines. Ranks on one machine take different ones even if
/// ANNULUS_NODE splits it into nodes. Collective over `ranks`.
[[nodiscard]] GpuBinding bind_gpus(Control& ranks, bool share);

/// Two ranks that compute on the same GPU, if there are any; `device` is the index of this rank's.
/// Collective over `ranks`.
[[nodiscard]] std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device);
/// The same; ranks with the same `machine` are on one machine.
[[nodiscard]] std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device,
                                                                  const std::string& machine);

}  // namespace annulus
